"""The diagonal of the curvature: an independent Gaussian for every weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchbayes.curvature.accumulate import Record
from torchbayes.curvature.linear import LinearRecord
from torchbayes.laplace.structure import Precision, Records, Solved, Structure
from torchbayes.posterior import Gaussian, Weights

__all__ = ["Diagonal", "diagonal_rows"]


def diagonal_rows(
    solved: Solved, name: str, record: Record, std: Tensor, start: int, stop: int
) -> Tensor:
    """Return rows with the inner products J diag(std²) Jᵀ of one weight.

    A linear map of one position has J = g xᵀ, and Σᵢⱼ gᵢ g'ᵢ xⱼ² stdᵢⱼ² is an inner product of vectors of the
    size of g.
    """
    if isinstance(record, LinearRecord) and record.x.shape[1] == 1:
        spread = solved.side(
            name, record, start, stop, lambda x: (x.square() @ std.square().t()).sqrt_()
        )
        return record.g[start:stop, 0] * spread
    return record.per_example(start, stop).mul_(std).flatten(1)


class Diagonal(Structure):
    """H ≈ diag(h), h the sum of squared gradients."""

    name = "diagonal"

    def add(self, records: Records, first: bool, weights: Tensor | None = None) -> None:
        """Add squares."""
        for name, record in records.items():
            weight = self.weights[name]
            record.write_to(self._sum(f"squares/{name}", weight.shape, weight), False)

    def finish(self) -> None:
        """Have zeros for weights that took no part."""
        for name, weight in self.weights.items():
            self._sum(f"squares/{name}", weight.shape, weight)

    def _precision(self, name: str, precision: Precision, scale: Tensor) -> Tensor:
        return scale * self.sums[f"squares/{name}"].double() + precision[name]

    def log_det(self, precision: Precision, scale: Tensor) -> Tensor:
        """Return Σ log(s·h + δ)."""
        parts = [self._precision(n, precision, scale).log().sum() for n in self.weights]
        return torch.stack(parts).sum()

    def solve(self, precision: Precision, scale: Tensor) -> Solved:
        """Return independent standard deviations."""
        return _Solved(
            {
                name: self._precision(name, precision, scale).rsqrt().to(weight.dtype)
                for name, weight in self.weights.items()
            }
        )


class _Solved(Solved):
    def __init__(self, std: Weights) -> None:
        super().__init__()
        self.std = std

    def rows(
        self, records: Records, names: Sequence[str], start: int, stop: int
    ) -> Iterator[Tensor | None]:
        for name in names:
            record = records.get(name)
            yield (
                None
                if record is None
                else diagonal_rows(self, name, record, self.std[name], start, stop)
            )

    def posterior(self, mean: Weights, **about: Any) -> Gaussian:
        return Gaussian(mean, self.std, **about)
