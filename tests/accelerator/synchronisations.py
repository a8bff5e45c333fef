"""How often Python waits for a device: reads of its tensors, and copies that do not return at once.

    with counted_synchronisations() as waits:
        step()
    assert not waits, waits

Counted are the operations that need a value from the device before they can return: `.item()` and with it
`float`, `bool` and `if`; `.cpu()`, `.tolist()` and other blocking copies between the device and the CPU;
`nonzero`, boolean masks and what else has a size that depends on values; `equal`; checks of what a routine of
linear algebra has reported. A copy with `non_blocking=True` is not one of them.

On the CPU there is nothing to wait for: tensors that are there do not count, unless `on="cpu"` asks for it.
What torch does below its dispatcher is not seen: the copy in `torch.tensor(value, device=…)` does not count.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Wait", "counted_synchronisations"]

_TORCH = str(Path(torch.__file__).parent)
_READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select",
    "unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount", "_linalg_check_errors",
    "_linalg_eigh", "_linalg_svd",
}  # fmt: skip
_MASKED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
_COPIES = {"_to_copy", "copy_", "copy"}


@dataclass(frozen=True)
class Wait:
    """One synchronisation: the operation, and the innermost line outside torch that led to it."""

    operation: str
    where: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.where}"


class _Counter(TorchDispatchMode):
    def __init__(self, waits: list[Wait], on: str | None) -> None:
        super().__init__()
        self.waits, self.on = waits, on

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if self._waits(name, args, kwargs):
            self.waits.append(Wait(name, _place()))
        return func(*args, **kwargs)

    def _counts(self, device: torch.device) -> bool:
        if self.on is not None:
            return device.type == self.on
        return device.type not in ("cpu", "meta")

    def _waits(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        if name not in _READS and name not in _MASKED and name not in _COPIES:
            return name == "repeat_interleave" and kwargs.get("output_size") is None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _COPIES:
            ends = {t.device for t in tensors[:2]}
            if name == "_to_copy" and kwargs.get("device") is not None:
                ends.add(torch.device(kwargs["device"]))
            blocking = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
            return blocking and len(ends) > 1 and any(map(self._counts, ends))
        if not any(self._counts(t.device) for t in tensors):
            return False
        masks = [t for t in tensors[1:] if t.dtype in (torch.bool, torch.uint8)]
        return name in _READS or (len(args) > 1 and any(m is t for m in masks for t in args[1]))


def _place() -> str:
    frames = traceback.extract_stack()
    inner = next(f for f in reversed(frames) if not f.filename.startswith((_TORCH, __file__)))
    return f"{Path(inner.filename).name}:{inner.lineno} ({inner.line})"


@contextmanager
def counted_synchronisations(on: str | None = None) -> Iterator[list[Wait]]:
    """Yield a list that gets an entry for every synchronisation inside the block, backward passes included.

    Args:
        on: Kind of the device whose tensors count, such as "cuda"; every one but the CPU if None.
    """
    waits: list[Wait] = []
    with _Counter(waits, on):
        yield waits
