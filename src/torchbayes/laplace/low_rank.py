"""The directions in which the data determine the weights best; the prior in all others.

H ≈ V Λ Vᵀ with the largest eigenvalues of the curvature. They are found in one pass: the rank directions so
far and a batch's gradients are the rows of a matrix, whose largest singular directions are kept (the
incremental singular value decomposition of M. Brand, 2002). With a diagonal prior Δ and W = Δ^-½ V Λ^½ the
precision is Δ^½ (I + W Wᵀ) Δ^½; its determinant and its root need matrices of the size of the rank only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchbayes.core import distributed
from torchbayes.laplace.full import all_rows, flat_precision
from torchbayes.laplace.structure import Precision, Records, Solved, Structure
from torchbayes.posterior import ShrunkGaussian, Weights
from torchbayes.posterior.full import unflattened

__all__ = ["LowRank", "largest_directions"]


def largest_directions(rows: Tensor, rank: int) -> Tensor:
    """Return at most `rank` rows R with RᵀR ≈ rowsᵀ rows: the largest singular directions, scaled."""
    gram = (rows @ rows.t()).double()
    values, vectors = torch.linalg.eigh(gram)
    keep = values > values[-1].clamp_min(0) * 1e-12
    keep[: max(0, len(values) - rank)] = False
    kept: Tensor = vectors[:, keep].t().to(rows) @ rows
    return kept


class LowRank(Structure):
    """H ≈ RᵀR with few rows R.

    Args:
        weights: The weights that the posterior is over.
        rank: Number of rows.
    """

    name = "low_rank"
    streams = False

    def __init__(self, weights: Weights, rank: int) -> None:
        super().__init__(weights)
        self.rank = rank
        self.size = sum(w.numel() for w in weights.values())
        like = next(iter(weights.values()))
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.sums["rows"] = torch.zeros(0, self.size, dtype=dtype, device=like.device)

    def add(self, records: Records, first: bool, weights: Tensor | None = None) -> None:
        """Take the gradients in, as many at a time as there are rows."""
        examples = next(iter(records.values())).examples
        step = max(self.rank, 64)
        for start in range(0, examples, step):
            new = all_rows(records, self.weights, start, min(start + step, examples))
            both = torch.cat([self.sums["rows"], new.to(self.sums["rows"])])
            self.sums["rows"] = largest_directions(both, self.rank)

    def reduce(self) -> None:
        """Keep the largest directions of all processes together."""
        own = self.sums["rows"]
        padded = torch.cat([own, own.new_zeros(self.rank - len(own), self.size)])
        self.sums["rows"] = largest_directions(torch.cat(distributed.gather(padded)), self.rank)

    def _white(self, precision: Precision, scale: Tensor) -> Tensor:
        """Return Wᵀ = √s R Δ^-½."""
        delta = flat_precision(precision, self.weights).to(self.sums["rows"].device)
        return scale.sqrt() * self.sums["rows"].double() * delta.rsqrt()

    def log_det(self, precision: Precision, scale: Tensor) -> Tensor:
        """Return log det Δ + log det(I + WᵀW)."""
        white = self._white(precision, scale)
        inner = white @ white.t() + torch.eye(len(white), dtype=white.dtype, device=white.device)
        prior: Tensor = flat_precision(precision, self.weights).double().log().sum()
        inside: Tensor = torch.linalg.slogdet(inner).logabsdet
        return prior + inside.to(prior.device)

    def solve(self, precision: Precision, scale: Tensor) -> Solved:
        """Return the directions, orthonormal after the prior's scaling, and their shrinkage."""
        white = self._white(precision, scale)
        values, vectors = torch.linalg.eigh(white @ white.t())
        keep = values > 1e-12
        directions = vectors[:, keep].t() @ white / values[keep].sqrt().unsqueeze(1)
        shrinkage = 1 - (1 + values[keep]).rsqrt()
        std = flat_precision(precision, self.weights).rsqrt()
        dtype = next(iter(self.weights.values())).dtype
        return _Solved(self.weights, std.to(dtype), directions.to(dtype), shrinkage.to(dtype))

    def row_size(self, records: Records) -> int:
        """Return the number of weights, for the gradients and what is subtracted."""
        return 2 * self.size


class _Solved(Solved):
    def __init__(
        self, weights: Weights, std: Tensor, directions: Tensor, shrinkage: Tensor
    ) -> None:
        super().__init__()
        self.weights, self.std = weights, std.to(directions.device)
        self.directions, self.shrinkage = directions, shrinkage

    def rows(
        self, records: Records, names: Sequence[str], start: int, stop: int
    ) -> Iterator[Tensor | None]:
        rows = all_rows(records, self.weights, start, stop) * self.std
        yield rows - ((rows @ self.directions.t()) * self.shrinkage) @ self.directions

    def posterior(self, mean: Weights, **about: Any) -> ShrunkGaussian:
        names = list(self.weights)
        return ShrunkGaussian(
            mean, unflattened(self.std, mean, names), unflattened(self.directions, mean, names),
            self.shrinkage, **about,
        )  # fmt: skip
