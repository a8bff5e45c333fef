"""A checkpoint on disk: nested state dictionaries as safetensors and JSON, with a checksum, twice.

    checkpoint.safetensors            the newest
    checkpoint-previous.safetensors   the one before, used if the newest is damaged or missing

Plain values and the structure are JSON in the file's header, tensors are its tensors. Nothing is unpickled,
so nothing in a file runs code, whatever version of torch reads it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.errors import FileError, RunError, WriteError
from torchbayes.core.storage import read_header, read_tensor_file, sync_folder, write_tensor_file

__all__ = ["CHECKPOINT_VERSION", "Checkpoint", "read_state", "write_state"]

CHECKPOINT_VERSION = 3
"""Raised when the state of a method changes, so that a checkpoint from before cannot be continued."""

_LOG = logging.getLogger("torchbayes")
_FORMAT = "torchbayes-checkpoint"
_STATE = "torchbayes-state"

# What `Training._save` writes; a file without all of it is refused before anything is restored from it.
_SCHEMA: Mapping[str, type | tuple[type, ...]] = {
    "epoch": int,
    "batch": int,
    "history": list,
    "sums": dict,
    "seconds": (int, float),
    "method": dict,
    "likelihood": dict,
    "noise": dict,
    "scaler": dict,
    "random": list,
}


class Checkpoint:
    """The two generations of a checkpoint.

    Args:
        newest: Path of the newest one.
    """

    def __init__(self, newest: Path) -> None:
        self.newest = newest
        self.previous = newest.with_name(f"{newest.stem}-previous{newest.suffix}")
        self._next = newest.with_name(f"{newest.stem}-next{newest.suffix}")

    def exists(self) -> bool:
        """Whether there is a checkpoint."""
        return self.newest.exists() or self.previous.exists()

    def write(self, state: dict[str, Any]) -> None:
        """Add a generation; a kill at any moment leaves at least one whole file."""
        tensors: dict[str, Tensor] = {}
        header = {
            "format": _FORMAT,
            "version": CHECKPOINT_VERSION,
            "rows": len(state["history"]),
            "state": _encoded(state, tensors, {}, "state"),
        }
        write_tensor_file(self._next, tensors, header)
        try:
            if self.newest.exists():
                self.newest.replace(self.previous)
            self._next.replace(self.newest)
            sync_folder(self.newest.parent)
        except OSError as error:
            raise WriteError.of(self.newest, error) from error

    def settle(self) -> None:
        """Finish or undo what a kill interrupted between two names."""
        try:
            if self._next.exists() and not self.newest.exists():
                self._next.replace(self.newest)
            self._next.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError.of(self.newest, error) from error

    def rows(self) -> int | None:
        """Return the number of epochs that the newest checkpoint has seen, or None if it does not tell."""
        rows = (read_header(self.newest) or {}).get("rows")
        return rows if isinstance(rows, int) else None

    def read(self) -> dict[str, Any] | None:
        """Return the last sound state, to continue from, or None if there is no checkpoint yet.

        Raises:
            RunError: If there is no sound one, or it was written by another version.
        """
        old = self.newest.with_suffix(".pt")
        if not self.exists():
            if old.exists():
                raise RunError(
                    f"{old} was written by an older torchbayes, whose checkpoints cannot be continued: start "
                    "the run again in another folder"
                )
            return None
        try:
            return _read(self.newest)
        except _AnotherVersion:
            raise
        except FileError as error:
            if not self.previous.exists():
                raise RunError(
                    f"{self.newest} is damaged and there is no other checkpoint: delete it to start again "
                    f"({error})"
                ) from error
            state = _read(self.previous)
            _LOG.warning(
                "%s is damaged or missing: going on from the checkpoint before it, of epoch %d",
                self.newest, state["epoch"] + 1,
            )  # fmt: skip
            return state

    def read_newest(self) -> dict[str, Any] | None:
        """Return the newest state, which is that of the end if the run is finished, or None."""
        return _read(self.newest) if self.newest.exists() else None


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a nested state, such as an averager's, to a file in another program's checkpoint."""
    tensors: dict[str, Tensor] = {}
    encoded = _encoded(state, tensors, {}, "state")
    header = {"format": _STATE, "version": 1, "state": encoded}
    write_tensor_file(path, tensors, header)


def read_state(path: Path) -> dict[str, Any]:
    """Read what `write_state` wrote.

    Raises:
        RunError: If the file is missing, damaged or not such a state.
    """
    header, tensors = read_tensor_file(path, _STATE, 1, "torchbayes state", RunError)
    try:
        state = _decoded(header["state"], {name: t.clone() for name, t in tensors.items()})
    except (KeyError, ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: its header does not fit its tensors") from error
    if not isinstance(state, dict):
        raise RunError(f"{path} is damaged or not a state: copy the checkpoint again")
    return state


class _AnotherVersion(RunError):
    """The file is sound, but not for this version."""


def _read(path: Path) -> dict[str, Any]:
    """Read one generation and hold it against the schema."""
    header = read_header(path)
    version = None if header is None else header.get("version")
    if isinstance(version, int) and header is not None and header.get("format") == _FORMAT:
        if version > CHECKPOINT_VERSION:
            raise _AnotherVersion(f"{path} was written by a newer torchbayes: upgrade torchbayes")
        if version < CHECKPOINT_VERSION:
            raise _AnotherVersion(
                f"{path} was written by an older torchbayes, whose methods kept another state: start the run "
                "again in another folder"
            )
    header, tensors = read_tensor_file(
        path, _FORMAT, CHECKPOINT_VERSION, "torchbayes checkpoint", RunError
    )
    try:
        # Copies: the tensors are mapped from the file.
        state = _decoded(
            header["state"], {name: tensor.clone() for name, tensor in tensors.items()}
        )
    except (KeyError, ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: its header does not fit its tensors") from error
    _check(path, state)
    assert isinstance(state, dict)
    return state


def _check(path: Path, state: Any) -> None:
    wrong = "state" if not isinstance(state, dict) else None
    if wrong is None:
        wrong = next(
            (k for k, t in _SCHEMA.items() if k not in state or not isinstance(state[k], t)), None
        )
    if wrong is None:
        counts = all(type(state[key]) is int and state[key] >= 0 for key in ("epoch", "batch"))
        sums = all(isinstance(value, float) for value in state["sums"].values())
        rows = all(isinstance(row, dict) for row in state["history"])
        randoms = bool(state["random"]) and all(
            isinstance(one, dict)
            and all(
                isinstance(one.get(k), Tensor) and one[k].dtype == torch.uint8
                for k in ("torch", "method")
            )
            for one in state["random"]
        )
        checks = {"epoch": counts, "sums": sums, "history": rows, "random": randoms}
        wrong = next((key for key, fine in checks.items() if not fine), None)
    if wrong is not None:
        raise RunError(f"{path} is damaged or not a checkpoint: it has no usable {wrong!r}")


def _encoded(
    value: Any, tensors: dict[str, Tensor], seen: dict[tuple[Any, ...], str], where: str
) -> Any:
    """Return a value as JSON can hold it, and collect its tensors by name.

    Plain values stand for themselves; everything else is a list that begins with its kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if value.is_complex():
            return ["complex", _encoded(torch.view_as_real(value), tensors, seen, where)]
        # Tied weights are stored once.
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
        name = seen.setdefault(key, f"{len(tensors):06d}")
        tensors.setdefault(name, value)
        # Memory formats such as channels_last are kept: draws are written in the order of memory.
        dense = torch.ops.aten.is_non_overlapping_and_dense(value)
        strides = [] if value.is_contiguous() or not dense else [list(value.stride())]
        return ["tensor", name, *strides]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_encoded(v, tensors, seen, f"{where}.{i}") for i, v in enumerate(value))]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where} has the key {key!r}: a checkpoint takes text and numbers")
        items = [[k, _encoded(v, tensors, seen, f"{where}.{k}")] for k, v in value.items()]
        # A module's state_dict has the versions of its layers in an attribute.
        versions = getattr(value, "_metadata", None)
        if isinstance(value, OrderedDict):
            return ["state", None if versions is None else dict(versions), *items]
        return ["dict", *items]
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: return numbers, text, "
        "tensors, lists and dictionaries of them from state_dict()"
    )


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Turn what `_encoded` returned back into the value."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("a table without a kind")
        return value
    kind, *rest = value
    if kind == "tensor":
        tensor = tensors[rest[0]]
        if len(rest) > 1:
            strided = torch.empty_strided(tensor.shape, rest[1], dtype=tensor.dtype)
            tensor = strided.copy_(tensor)
        return tensor
    if kind == "complex":
        return torch.view_as_complex(_decoded(rest[0], tensors))
    if kind in ("list", "tuple"):
        items = [_decoded(item, tensors) for item in rest]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _decoded(item, tensors) for key, item in rest}
    if kind == "state":
        versions, *pairs = rest
        state: OrderedDict[Any, Any] = OrderedDict((k, _decoded(v, tensors)) for k, v in pairs)
        if versions is not None:
            state._metadata = versions  # type: ignore[attr-defined]
        return state
    raise ValueError(f"unknown kind {kind!r}")
