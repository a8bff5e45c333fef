"""What is known of one use of a weight once the gradient of that use's output has arrived.

A *record* can give the gradients of single examples. They are those of the loss as it was differentiated,
a mean over M examples, so a record's gradient of example i is ∇ℓᵢ / M (times a loss scale, if any).
Records never hold examples × weights at once: they are asked for a few examples at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from torchbayes.curvature.products import CHUNK

__all__ = ["Record", "VectorRecord", "add_squares", "wide"]


def wide(tensor: Tensor) -> Tensor:
    """The tensor in at least single precision: squares of half-precision numbers over- and underflow."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def add_squares(gradients: Tensor, total: Tensor) -> None:
    """Add the squares of per-example gradients, of shape (examples, *weight), to `total`; overwrites them."""
    total.add_(gradients.square_().sum(0))


class Record(ABC):
    """One use of a weight in a forward pass that has been differentiated.

    Args:
        target: The weight, or what was computed from weights alone and used in the weight's place.
        examples: The number of examples.
    """

    def __init__(self, target: Tensor, examples: int) -> None:
        self.target, self.examples = target, examples

    @abstractmethod
    def per_example(self, start: int, stop: int) -> Tensor:
        """The gradients of examples start … stop − 1, a new tensor of shape (stop − start, *weight)."""

    def write_to(self, total: Tensor, fresh: bool) -> None:
        """Add the sum over examples of squared gradients to `total`, or overwrite it if it is fresh."""
        if fresh:
            total.zero_()
        step = max(1, CHUNK // max(1, total.numel()))
        for start in range(0, self.examples, step):
            add_squares(self.per_example(start, min(start + step, self.examples)), total)

    @classmethod
    def joined(cls, records: Sequence[Record]) -> Record | None:
        """One record whose gradients are the sums of those of several uses, if there is a cheap one."""
        return None


class VectorRecord(Record):
    """A use with so few weights that the gradients of all examples are simply kept: biases, norm scales.

    Args:
        target: The weight.
        gradients: Its gradients, of shape (examples, *weight).
    """

    def __init__(self, target: Tensor, gradients: Tensor) -> None:
        super().__init__(target, gradients.shape[0])
        self.gradients = gradients

    def per_example(self, start: int, stop: int) -> Tensor:
        """Rows of the kept gradients."""
        return self.gradients[start:stop].clone()

    def write_to(self, total: Tensor, fresh: bool) -> None:
        """Square all of them at once."""
        sums = self.gradients.square().sum(0)
        total.copy_(sums) if fresh else total.add_(sums)

    @classmethod
    def joined(cls, records: Sequence[Record]) -> Record | None:
        """The sum of the kept gradients."""
        kept = [r.gradients for r in records if isinstance(r, VectorRecord)]
        if len(kept) < len(records):
            return None
        return cls(records[0].target, torch.stack(kept).sum(0))
