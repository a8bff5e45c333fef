"""What every structure of a Laplace posterior's precision, s·H + diag(δ), has in common.

H is the curvature of the training set, gathered in one pass; s = 1/σ² the scale of Gaussian noise; δ the
prior's precision. A structure gathers its form of H, knows log det(s·H + δ) as a function of s and δ, and
for given s and δ makes a `Solved`: the posterior, and rows r(J) of the Jacobian with r(J) r(J)ᵀ = J (s·H +
δ)⁻¹ Jᵀ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchbayes.core import distributed
from torchbayes.curvature.accumulate import Record
from torchbayes.curvature.linear import LinearRecord
from torchbayes.posterior import Posterior, Weights

__all__ = ["Precision", "Records", "Solved", "Structure", "record_size", "rows_of"]

Records = Mapping[str, Record]
"""The examples' gradients in one backward pass, by weight."""

Precision = Mapping[str, Tensor]
"""The prior's precision of every weight tensor: one number, or one for each of its entries."""


def rows_of(records: Records, name: str, like: Tensor, start: int, stop: int) -> Tensor:
    """Return the gradients of some examples, (examples, weights); zeros if the weight took no part."""
    if name not in records:
        return like.new_zeros(stop - start, like.numel())
    return records[name].per_example(start, stop).flatten(1)


def record_size(record: Record) -> tuple[int, int]:
    """Count the numbers of a record: those of its input, shared by all columns, and the others."""
    tensors = {k: v.numel() for k, v in vars(record).items() if isinstance(v, Tensor)}
    for other in ("target", "beside"):
        tensors.pop(other, None)
    shared = tensors.pop("x", 0)
    return shared, sum(tensors.values())


def _row_size(record: Record, weight: Tensor) -> int:
    if isinstance(record, LinearRecord) and record.x.shape[1] == 1:
        return 3 * len(weight)
    return 3 * weight.numel()  # the gradient and two products, or the result and a copy


class Solved(ABC):
    """A structure with a prior and a noise level."""

    def __init__(self) -> None:
        self._sides: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}

    def side(
        self, name: str, record: LinearRecord, start: int, stop: int,
        make: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        """Return what `make` makes of a layer's inputs, kept for the gradients of the other outputs."""
        x = record.x[start:stop, 0]
        kept = self._sides.get((name, start, stop))
        # A tensor that is held keeps its place in memory.
        if kept is None or kept[0].data_ptr() != x.data_ptr() or kept[0].shape != x.shape:
            kept = self._sides[name, start, stop] = x, make(x)
        return kept[1]

    def forget(self) -> None:
        """Drop what `side` has kept: call it before the next batch."""
        self._sides = {}

    @abstractmethod
    def rows(
        self, records: Records, names: Sequence[str], start: int, stop: int
    ) -> Iterator[Tensor | None]:
        """Yield matrices (examples, …) whose rows together have the inner products J Σ Jᵀ.

        Args:
            records: The gradients of one output.
            names: The weights, in the order in which to yield their rows, None for one without a record.
            start: First example.
            stop: End of the examples.
        """

    @abstractmethod
    def posterior(self, mean: Weights, **about: Any) -> Posterior:
        """Return the posterior with these means."""


class Structure(ABC):
    """A form of the curvature H.

    Args:
        weights: The weights that the posterior is over.

    Attributes:
        sums: The statistics, sums over examples.
    """

    name: ClassVar[str]
    streams: ClassVar[bool] = True
    """Whether `add` may be called for one weight at a time."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.sums: Weights = {}

    @abstractmethod
    def add(self, records: Records, first: bool, weights: Tensor | None = None) -> None:
        """Add one column of a batch.

        Args:
            records: The examples' gradients.
            first: Whether it is the batch's first column.
            weights: Weights of the examples, whose roots are in the gradients already; None for 1.
        """

    def reduce(self) -> None:
        """Add up the statistics of all processes."""
        distributed.sum_packed([self.sums[name] for name in sorted(self.sums)])

    def finish(self) -> None:  # noqa: B027
        """Prepare for `log_det` and `solve` when all data have been seen."""

    @abstractmethod
    def log_det(self, precision: Precision, scale: Tensor) -> Tensor:
        """Return log det(scale · H + diag(precision)), differentiable in both."""

    @abstractmethod
    def solve(self, precision: Precision, scale: Tensor) -> Solved:
        """Return the posterior's parts for one prior and noise level."""

    def row_size(self, records: Records) -> int:
        """Return the numbers that `Solved.rows` has in memory for one example and output at a time."""
        return max(_row_size(records[name], self.weights[name]) for name in records)

    def _sum(self, name: str, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
        """Return a statistic, new at 0."""
        if name not in self.sums:
            dtype = torch.promote_types(like.dtype, torch.float32)
            self.sums[name] = torch.zeros(shape, dtype=dtype, device=like.device)
        return self.sums[name]
