"""Arguments of torch's built-in functions by name, however they were passed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "bind", "no_autocast", "ntuple"]


def bind(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any
) -> dict[str, Any]:
    """Name positional arguments; the ones that were not given get their defaults."""
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def ntuple(value: Any, count: int) -> list[int]:
    """One number per dimension."""
    if isinstance(value, int):
        return [value] * count
    values = list(value)
    return values * count if len(values) == 1 else values


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast would compute a linear map of `tensor` in, if it is on."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast off for a backward pass, whose tensors have their types already."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
