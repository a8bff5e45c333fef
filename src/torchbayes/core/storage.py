"""Files that are either complete or absent, however the process ends, and never run code when read."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchbayes._version import __version__

__all__ = [
    "PosteriorFileError",
    "atomic_path",
    "checksum",
    "read_tensors",
    "write_json",
    "write_tensors",
    "write_text",
]

_FORMAT = "torchbayes-posterior"
_VERSION = 1


class PosteriorFileError(ValueError):
    """A posterior's file is missing, truncated, damaged, of another program or of another model."""


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it when the block succeeds.

    The content is flushed to disk before the rename, so after a kill or a power cut `path` is the old file
    or the new one, never a part of it.

    Args:
        path: The file to write. Its folder is created if necessary.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        # mkstemp creates files that only their owner can read; set the permissions of an ordinary open().
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` completely or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: Any) -> None:
    """Write `content` to `path` as indented JSON, as a whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def checksum(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Return a CRC of all that a reader relies on: the header, and every tensor's name, type and content."""
    described = {key: value for key, value in header.items() if key != "crc32"}
    crc = zlib.crc32(json.dumps(described, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        crc = zlib.crc32(f"{name}:{tensor.dtype}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, kind: str, model_name: str,
    settings: dict[str, Any],
) -> None:  # fmt: skip
    """Write named tensors with a header that describes them."""
    # safetensors rejects tensors that share memory, so clone those that do.
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        if value.untyped_storage().data_ptr() in seen or value.untyped_storage().nbytes() != (
            value.numel() * value.element_size()
        ):
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        plain[name] = value
    header: dict[str, Any] = {
        "format": _FORMAT, "version": _VERSION, "torchbayes": __version__, "kind": kind,
        "model": model_name, "settings": settings,
        # Also the order of the tensors, which safetensors does not keep.
        "shapes": {name: list(tensor.shape) for name, tensor in plain.items()},
    }  # fmt: skip
    header["crc32"] = checksum(header, plain)
    with atomic_path(path) as temporary:
        save_file(plain, str(temporary), metadata={"torchbayes": json.dumps(header)})


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file of `write_tensors`, or raise a `PosteriorFileError` that says what is wrong."""
    if not path.is_file():
        raise PosteriorFileError(
            f"there is no posterior file {path}: train a run first or check the path"
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
            header = json.loads(metadata["torchbayes"]) if metadata else None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise PosteriorFileError(
            f"{path} is cut short, damaged or not a safetensors file ({error}): copy or train it again"
        ) from error
    except (KeyError, TypeError, ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise PosteriorFileError(
            f"{path} is a safetensors file but not a torchbayes posterior: pass one that save() wrote"
        )
    version = header.get("version")
    if not isinstance(version, int) or version > _VERSION:
        raise PosteriorFileError(
            f"{path} was written by torchbayes {header.get('torchbayes')} in file version {version}; this "
            f"torchbayes reads up to {_VERSION}: upgrade torchbayes"
        )
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if header.get("shapes") != shapes or header.get("crc32") != checksum(header, tensors):
        raise PosteriorFileError(
            f"{path} is damaged: its tensors are not the ones its header describes; copy or train it again"
        )
    for key, expected in (("kind", str), ("model", str), ("settings", dict)):
        if not isinstance(header.get(key), expected):
            raise PosteriorFileError(f"{path} is damaged: its header lacks the {key}")
    # In the order in which they were written, so that the same generator gives the same draws.
    return header, {name: tensors[name] for name in header["shapes"]}
