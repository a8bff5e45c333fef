"""Embeddings: a row of the gradient for every index that an example looks up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchbayes.curvature.accumulate import Record, wide

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Capture

__all__ = ["embedding"]


class _LookupRecord(Record):
    """A use of a table by indices of shape (examples, positions)."""

    def __init__(self, target: Tensor, indices: Tensor, g: Tensor, padding_idx: int) -> None:
        super().__init__(target, indices.shape[0])
        self.indices = indices.reshape(len(indices), -1)
        self.g = wide(g).reshape(*self.indices.shape, *target.shape[1:])
        if padding_idx >= 0:
            self.g = self.g * (self.indices != padding_idx).unsqueeze(-1)

    def per_example(self, start: int, stop: int) -> Tensor:
        count, rows = stop - start, len(self.target)
        table = self.g.new_zeros(count * rows, *self.target.shape[1:])
        offset = torch.arange(count, device=table.device).unsqueeze(1) * rows
        places = (self.indices[start:stop] + offset).flatten()
        table.index_add_(0, places, self.g[start:stop].flatten(0, 1))
        return table.view(count, *self.target.shape)

    def write_to(self, total: Tensor, fresh: bool) -> None:
        """Sum the gradients of each (example, index) pair, then square: no table per example."""
        if fresh:
            total.zero_()
        rows = len(self.target)
        offset = torch.arange(self.examples, device=total.device).unsqueeze(1) * rows
        pairs, place = torch.unique(self.indices + offset, return_inverse=True)
        sums = total.new_zeros(len(pairs), *total.shape[1:])
        sums.index_add_(0, place.flatten(), self.g.flatten(0, 1).to(sums.dtype))
        total.index_add_(0, pairs % rows, sums.square_())


def embedding(
    capture: Capture, func: Callable[..., Tensor], weight: Tensor, indices: Tensor,
    padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    """Apply the rule for `torch.embedding`."""
    given = (weight, indices, padding_idx, scale_grad_by_freq, sparse)
    target = capture.tracker.target(weight)
    if target is None or capture.tracker.is_constant(indices):
        return capture.other(func, given)
    for option, is_set in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if is_set:
            raise ValueError(
                f"{capture.tracker.describe(target)} belongs to an embedding with {option}=True, whose "
                f"gradient is not the plain one: set {option}=False"
            )
    capture.tracker.check_examples(indices.shape[0] if indices.dim() > 0 else 1, target)
    output = func(*given)
    capture.watch(output, target, lambda g: _LookupRecord(target, indices, g, padding_idx))
    return output
