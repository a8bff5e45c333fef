"""Has a backward pass been here? Gradients are marked before a block and looked at after it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["has_new_gradient", "mark_gradients"]


def mark_gradients(parameters: Iterable[Tensor]) -> None:
    """Mark the gradients as they are now.

    The mark is on the tensor itself: an id may be used again once `zero_grad` has let go of a gradient, and a
    reference would keep it in memory.
    """
    for p in parameters:
        if p.grad is not None:
            p.grad._torchbayes_mark = p.grad._version  # type: ignore[attr-defined]


def has_new_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient that is not the marked one."""
    gradient = parameter.grad
    return gradient is not None and getattr(gradient, "_torchbayes_mark", None) != gradient._version
