"""The whole curvature matrix, for a few thousand weights at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchbayes.laplace.structure import Precision, Records, Solved, Structure, rows_of
from torchbayes.posterior import FullGaussian, Weights

__all__ = ["Full", "all_rows", "flat_precision"]


def all_rows(records: Records, weights: Weights, start: int, stop: int) -> Tensor:
    """Return the gradients of all weights, (examples, weights)."""
    return torch.cat([rows_of(records, n, w, start, stop) for n, w in weights.items()], 1)


def flat_precision(precision: Precision, weights: Weights) -> Tensor:
    """Return the prior's precisions of all weights as one vector."""
    return torch.cat([precision[n].expand(w.shape).reshape(-1) for n, w in weights.items()])


class Full(Structure):
    """H, with a row and a column for every weight."""

    name = "full"
    streams = False

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.size = sum(w.numel() for w in weights.values())
        self._values: Tensor | None = None

    def add(self, records: Records, first: bool, weights: Tensor | None = None) -> None:
        """Add Σ ∇ ∇ᵀ."""
        rows = all_rows(records, self.weights, 0, next(iter(records.values())).examples)
        # In double precision a sum of products has no eigenvalue below 0 that a prior does not outweigh.
        rows = rows.double()
        self._matrix().addmm_(rows.t(), rows)

    def _matrix(self) -> Tensor:
        like = next(iter(self.weights.values())).double()
        return self._sum("matrix", (self.size, self.size), like[:0])

    def finish(self) -> None:
        """Compute eigenvalues, for priors of one precision."""
        self._values = torch.linalg.eigvalsh(self._matrix()).clamp_min(0)

    def log_det(self, precision: Precision, scale: Tensor) -> Tensor:
        """Return it from the eigenvalues of H for one precision, otherwise by a Cholesky factor."""
        assert self._values is not None
        deltas = list(precision.values())
        if all(delta is deltas[0] for delta in deltas) and deltas[0].numel() == 1:
            return (scale * self._values + deltas[0]).log().sum()
        root = torch.linalg.cholesky(self.precision(precision, scale))
        log_det: Tensor = 2 * root.diagonal().log().sum()
        return log_det

    def precision(self, precision: Precision, scale: Tensor) -> Tensor:
        """Return s·H + diag(δ)."""
        matrix = scale * self.sums["matrix"]
        return matrix + torch.diag(flat_precision(precision, self.weights).to(matrix))

    def solve(self, precision: Precision, scale: Tensor) -> Solved:
        """Return a root of the inverse."""
        lower = torch.linalg.cholesky(self.precision(precision, scale))
        eye = torch.eye(self.size, dtype=lower.dtype, device=lower.device)
        # P = L Lᵀ, so P⁻¹ = L⁻ᵀ L⁻¹.
        root = torch.linalg.solve_triangular(lower, eye, upper=False).t()
        return _Solved(self.weights, root.to(next(iter(self.weights.values())).dtype))

    def row_size(self, records: Records) -> int:
        """Return the number of weights, for the gradients and for their products with the root."""
        return 2 * self.size


class _Solved(Solved):
    def __init__(self, weights: Weights, root: Tensor) -> None:
        super().__init__()
        self.weights, self.root = weights, root

    def rows(
        self, records: Records, names: Sequence[str], start: int, stop: int
    ) -> Iterator[Tensor | None]:
        yield all_rows(records, self.weights, start, stop) @ self.root

    def posterior(self, mean: Weights, **about: Any) -> FullGaussian:
        return FullGaussian(mean, list(self.weights), self.root, **about)
