"""Large tensors that are used again instead of being allocated anew.

A fresh large tensor pays for the pages the system maps for it: on the build machine up to five times
the price of writing into a kept one. A `Pool` keeps the tensors it has handed out and gives one out again
when nothing else refers to its memory: no draw in use, no saved tensor of a graph, no `.grad`, no view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Pool"]


# Older builds of torch have it only with CUDA. Without it nothing is used again, and all else is the same.
_use_count = getattr(torch._C, "_storage_Use_Count", None)


def _references(tensor: Tensor) -> int:
    return -1 if _use_count is None else int(_use_count(tensor.untyped_storage()._cdata))


_UNUSED = max(0, _references(torch.empty(1)))


class Pool:
    """Hands out flat tensors and takes them back by itself. A copy or pickle of a pool is empty."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of `count` elements, whatever is in it.

        Args:
            count: The number of elements.
            dtype: The tensor's type.
            device: Where it is.
        """
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode can never take part in a graph: not for keeping.
            return torch.empty(count, dtype=dtype, device=device)
        kept = self._kept.setdefault((count, dtype, device), [])
        for tensor in kept:
            if _references(tensor) == _UNUSED:
                return tensor.detach()
        kept.append(torch.empty(count, dtype=dtype, device=device))
        return kept[-1].detach()

    def like(self, flat: Tensor) -> Tensor:
        """A tensor of the size, type and device of another, whatever is in it."""
        return self.take(flat.numel(), flat.dtype, flat.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        return Pool()

    def __reduce__(self) -> tuple[type[Pool], tuple[()]]:
        return Pool, ()
