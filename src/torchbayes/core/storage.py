"""Files that are either complete or absent, however the process ends, and never run code when read.

Every file of the library is written by `atomic_path`. Tensors are stored in safetensors' format with a header
that has a checksum of all that a reader relies on; JSON and TOML files carry one as well, see
`torchbayes.core.reading`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchbayes._version import __version__
from torchbayes.core.errors import FileError, PosteriorFileError, WriteError
from torchbayes.core.locks import lock_file

__all__ = [
    "PosteriorFileError",
    "append_line",
    "atomic_path",
    "checksum",
    "json_checksum",
    "read_header",
    "read_tensor_file",
    "read_tensors",
    "remove_strays",
    "sync_folder",
    "write_json",
    "write_tensor_file",
    "write_tensors",
    "write_text",
]

_LOG = logging.getLogger("torchbayes")
_FORMAT = "torchbayes-posterior"
_VERSION = 1
# The names of temporary files: only these are taken for ours, in a folder that others write to as well.
_STRAY = re.compile(r"\.(.*)\.[0-9a-f]{12}\.part", re.DOTALL)

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it when the block succeeds.

    The content is flushed to disk before the rename and the folder after it, so after a kill or a power
    cut `path` is the old file or the new one, never a part of it. Temporary files that killed processes have
    left of the same file are removed.

    Args:
        path: The file to write. Its folder is created if necessary.

    Raises:
        WriteError: If the disk is full, the folder is gone or cannot be written to, and so on.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_strays(path.parent, of=path.name)
        temporary, handle = _new_temporary(path)
        try:
            yield temporary
            os.fsync(handle)
            if os.name == "nt":  # which does not rename a file that is open
                os.close(handle)
                handle = -1
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if handle >= 0:
                os.close(handle)
    except WriteError:
        raise
    except OSError as error:
        raise WriteError.of(path, error) from error


def _new_temporary(path: Path) -> tuple[Path, int]:
    """Create a temporary file beside `path` and hold a lock on it, by which it is known to be in use."""
    while True:
        temporary = path.with_name(f".{_shortened(path.name)}.{secrets.token_hex(6)}.part")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # `remove_strays` may have taken the file for a stray one before it was locked.
        if lock_file(handle) and temporary.exists():
            return temporary, handle
        os.close(handle)


def _shortened(name: str) -> str:
    """Return so much of a file's name that a longer one can be made of it: a name may have 255 bytes."""
    return os.fsdecode(os.fsencode(name)[:200])


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_strays(folder: Path, of: str | None = None) -> None:
    """Remove the temporary files that killed processes have left in a folder; those in use are locked.

    Args:
        folder: The folder, which need not exist.
        of: Name of a file: only what was to become it is removed.
    """
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        for name in names:
            found = _STRAY.fullmatch(name)
            if found is not None and (of is None or found[1] == _shortened(of)):
                _remove_stray(folder / name)


def _remove_stray(stray: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(stray, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            if lock_file(handle):
                stray.unlink(missing_ok=True)
        finally:
            os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` completely or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Add a line to a file and flush it to disk; after a kill, at most this line is cut short."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WriteError.of(path, error) from error


def write_json(path: str | Path, content: Any) -> None:
    """Write `content` to `path` as indented JSON, as a whole or not at all.

    A table gets a last entry `crc32`, which `read_json` checks and takes out again.
    """
    if isinstance(content, Mapping):
        content = {**content, "crc32": json_checksum(content)}
    write_text(path, json.dumps(content, indent=2) + "\n")


def json_checksum(content: Any) -> str:
    """Return a checksum of what a reader gets from JSON, whatever the white space and the order of keys."""
    read_back = json.loads(json.dumps(content))  # keys that are numbers become text
    return f"{zlib.crc32(json.dumps(read_back, sort_keys=True).encode()):08x}"


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def checksum(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Return a CRC of all that a reader relies on: the header, and every tensor's name, type and content."""
    described = {key: value for key, value in header.items() if key != "crc32"}
    crc = zlib.crc32(json.dumps(described, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        crc = zlib.crc32(f"{name}:{tensor.dtype}".encode(), crc)
        crc = zlib.crc32(_bytes(tensor), crc)
    return crc


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> int:
    """Write named tensors in safetensors' format under a header of our own; return its checksum.

    Not by `safetensors.torch.save_file`, which renames a temporary file of its own without flushing it to
    disk, nor by `save`, which needs the memory twice.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    paired = [name for name, tensor in plain.items() if tensor.is_complex()]
    if paired:  # which not every version of safetensors can read
        plain |= {name: torch.view_as_real(plain[name].resolve_conj()) for name in paired}
        header = {**header, "complex": paired}
    for name, tensor in plain.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name!r} is of {tensor.dtype}, which a file cannot hold: convert it")
    # `shapes` is also the order of the tensors, which a safetensors file does not keep.
    shapes = {name: list(tensor.shape) for name, tensor in plain.items()}
    whole: dict[str, Any] = {**header, "torchbayes": __version__, "shapes": shapes}
    whole["crc32"] = checksum(whole, plain)
    # The widest types first, so that every tensor is aligned.
    order = sorted(plain, key=lambda name: (-plain[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": {"torchbayes": json.dumps(whole)}}
    end = 0
    for name in order:
        begin, end = end, end + plain[name].numel() * plain[name].element_size()
        dtype = _DTYPES[plain[name].dtype]
        entries[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [begin, end]}
    front = json.dumps(entries).encode()
    front += b" " * (-len(front) % 8)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(front)) + front)
        for name in order:
            file.write(_bytes(plain[name]))
    return int(whole["crc32"])


def read_header(path: Path) -> dict[str, Any] | None:
    """Return the header of a file of `write_tensor_file` without its tensors and unchecked, or None."""
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})["torchbayes"])
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None


def _brief(said: object) -> str:
    """Return what a damaged file or its reader says, which may quote all of it, on one short line."""
    text = " ".join(str(said).split())
    return text if len(text) <= 200 else f"{text[:200]}…"


def read_tensor_file(
    path: Path, format_: str, version: int, what: str, error_type: type[FileError] = FileError
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file of `write_tensor_file`, check all of it and return its header and tensors.

    Args:
        path: The file.
        format_: The header's `format`.
        version: Newest `version` that can be read.
        what: What the file should be, for messages.
        error_type: Error to raise if anything is wrong.
    """
    if not path.is_file():
        raise error_type(
            f"there is no {what.removeprefix('torchbayes ')} file {path}: train a run first or check the path"
        )
    try:
        # safetensors holds every size that the header claims against the file's before it reads a tensor.
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
            header = json.loads(metadata["torchbayes"]) if metadata else None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise error_type(
            f"{path} is cut short, damaged or not a safetensors file ({_brief(error)}): copy or train it "
            "again"
        ) from error
    except (KeyError, TypeError, ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != format_:
        raise error_type(
            f"{path} is a safetensors file but not a {what}: pass one that save() wrote"
        )
    found = header.get("version")
    if not isinstance(found, int) or found > version:
        raise error_type(
            f"{path} was written by torchbayes {_brief(header.get('torchbayes'))} in file version "
            f"{_brief(found)}; this torchbayes reads up to {version}: upgrade torchbayes"
        )
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if header.get("shapes") != shapes or header.get("crc32") != checksum(header, tensors):
        raise error_type(
            f"{path} is damaged: its tensors are not the ones its header describes; copy or train it again"
        )
    for name in header.get("complex", ()):
        tensors[name] = torch.view_as_complex(tensors[name])
    # In the order in which they were written, so that the same generator gives the same draws.
    return header, {name: tensors[name] for name in header["shapes"]}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, kind: str, model_name: str,
    settings: dict[str, Any],
) -> int:  # fmt: skip
    """Write a posterior's named tensors with a header that describes them; return their checksum."""
    header = {
        "format": _FORMAT, "version": _VERSION, "kind": kind, "model": model_name,
        "settings": settings,
    }  # fmt: skip
    return write_tensor_file(path, tensors, header)


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file of `write_tensors`, or raise a `PosteriorFileError` that says what is wrong."""
    header, tensors = read_tensor_file(
        path, _FORMAT, _VERSION, "torchbayes posterior", PosteriorFileError
    )
    for key, expected in (("kind", str), ("model", str), ("settings", dict)):
        if not isinstance(header.get(key), expected):
            raise PosteriorFileError(f"{path} is damaged: its header lacks the {key}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            continue
        if bool(torch.isnan(tensor).any()):
            raise PosteriorFileError(
                f"{path} has NaN in {name!r}: its training broke down; train it again with a smaller lr"
            )
        _LOG.warning("%s has infinite values in %r, which predictions may inherit", path, name)
    return header, tensors
