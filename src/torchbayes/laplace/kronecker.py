"""Kronecker factors of every layer's curvature, with their eigenvalues, so that a new prior costs nothing.

H. Ritter, A. Botev and D. Barber, A Scalable Laplace Approximation for Neural Networks, ICLR 2018, in the
form of E. Daxberger et al., Laplace Redux, NeurIPS 2021, whose conventions these are:

| symbol | here |
| --- | --- |
| B = Σₙ Σ_c Σₜ g gᵀ, g the gradient at an output of the layer for column c and position t | `outputs/…` |
| A = (1/NT) Σₙ Σₜ a aᵀ, a an input of the layer; a weighted mean | `inputs/…` or `shifts/…`, over `rows/…` |
| the weight's curvature, B ⊗ A = (U_B ⊗ U_A)(λ_B ⊗ λ_A)(U_B ⊗ U_A)ᵀ | |
| the bias's curvature, B | |

The precision of a weight is then s·λ_B ⊗ λ_A + δ in the basis U_B ⊗ U_A, exactly, as long as the prior has
one δ for the tensor. Weight and bias are apart so that each may have its own. What is neither the weight
nor the bias of a linear map or an ungrouped convolution (norms, embeddings, transposed convolutions,
weights behind a reparameterisation) has the diagonal of its curvature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.linalg import eigh
from torch import Tensor

from torchbayes.curvature.accumulate import CHUNK, Record, VectorRecord
from torchbayes.curvature.conv import ConvRecord
from torchbayes.curvature.linear import LinearRecord
from torchbayes.laplace.diagonal import diagonal_rows
from torchbayes.laplace.shifts import (
    PRODUCTS,
    add_products_of_shifts,
    is_plain,
    patch_products,
)
from torchbayes.laplace.structure import Precision, Records, Solved, Structure
from torchbayes.posterior import KroneckerGaussian, Weights

__all__ = ["Kronecker"]

# Entries of the patches that are held at a time: more take memory, and no less time.
_PATCHES = CHUNK // 4
# From this number of positions on, a product per example is faster than rearranging the whole batch.
_MANY_POSITIONS = 64
# Up to this size eigenvalues are computed in double precision, which takes twice the time.
_DOUBLE_UP_TO = 128
# From this size on LAPACK is called through SciPy, which puts the eigenvectors where the matrix was: torch
# copies it first.
_LARGE = 1024
# Entries of a side of a factor: the matrix takes 1.5 GB, and its eigenvalues many minutes.
_FACTOR_UP_TO = 20_000


def _factored(record: Record) -> bool:
    """Whether a use of a weight has two factors."""
    if isinstance(record, ConvRecord):
        return record.geometry.groups == 1 and not record.swapped
    return isinstance(record, LinearRecord)


def _check_size(name: str, weight: Tensor) -> None:
    for side, size in (("outputs", len(weight)), ("inputs", weight[0].numel())):
        if size > _FACTOR_UP_TO:
            raise ValueError(
                f"structure='kronecker' has a matrix of {size:,} × {size:,} for the {side} of {name!r}, "
                f"{4 * size**2 / 2**30:,.0f} GB, but takes up to {_FACTOR_UP_TO:,}: use "
                "structure='diagonal', or a subset without this weight"
            )


def _add_inputs(record: Record, total: Tensor, weights: Tensor | None) -> float:
    """Add Σ a aᵀ over examples and positions to `total`, its lower triangle; return their number.

    Weights of the examples multiply both, so that an example of weight 2 counts as two.
    """
    root = None if weights is None else weights.sqrt().to(total).reshape(-1, 1, 1)
    count = record.examples if weights is None else float(weights.sum())
    if isinstance(record, LinearRecord):
        x = record.x if root is None else record.x * root
        _add_products(x.reshape(-1, x.shape[-1]), total)
        return count * x.shape[1]
    assert isinstance(record, ConvRecord)
    patches = record.patches()
    step = max(1, _PATCHES // (patches.rows * patches.positions))
    for start in range(0, record.examples, step):
        stop = min(start + step, record.examples)
        part = patches.of(start, stop)
        _add_outer(part if root is None else part * root[start:stop], total)
    return count * patches.positions


def _add_outer(features: Tensor, total: Tensor) -> None:
    """Add the lower triangle of Σ f fᵀ, for features of shape (examples, features, positions)."""
    if features.shape[2] < _MANY_POSITIONS:
        _add_products(features.transpose(1, 2).reshape(-1, features.shape[1]), total)
        return
    for start, stop in _blocks(len(total)):
        total[start:, start:stop].addbmm_(
            features[:, start:], features[:, start:stop].transpose(1, 2)
        )


def _add_products(rows: Tensor, total: Tensor) -> None:
    """Add the lower triangle of Σ r rᵀ."""
    for start, stop in _blocks(len(total)):
        total[start:, start:stop].addmm_(rows[:, start:].t(), rows[:, start:stop])


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield blocks of columns; the products of each are needed from the diagonal down, being symmetric."""
    step = -(-size // (4 if size >= 512 else 2 if size >= 64 else 1))
    for start in range(0, size, step):
        yield start, min(start + step, size)


def _add_outputs(record: Record, total: Tensor) -> None:
    """Add Σ g gᵀ over examples and positions to `total`, its lower triangle."""
    if isinstance(record, ConvRecord):
        _add_products(record.g.transpose(0, 1).reshape(len(total), -1).t(), total)
    else:
        assert isinstance(record, LinearRecord)
        _add_products(record.g.reshape(-1, record.g.shape[-1]), total)


@dataclass
class _Factor:
    """Eigenvalues and eigenvectors of a factor."""

    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> _Factor:
        """Decompose a symmetric matrix that is known by its lower triangle, and may be overwritten."""
        if len(matrix) >= _LARGE and matrix.device.type == "cpu":
            found = eigh(  # the transpose is in LAPACK's order
                matrix.numpy().T, lower=False, driver="evd", overwrite_a=True, check_finite=False
            )
            values, vectors = map(torch.from_numpy, found)
        else:
            work = matrix.double() if len(matrix) <= _DOUBLE_UP_TO else matrix
            values, vectors = torch.linalg.eigh(work, UPLO="L")
        return cls(values.double().clamp_min(0), vectors.to(matrix.dtype))


class Kronecker(Structure):
    """H ≈ a block B ⊗ A for every weight, B for its bias, and a diagonal for the rest."""

    name = "kronecker"

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.biases: dict[str, str] = {}
        """The weight beside which each bias is used."""
        self._names = {id(weight): name for name, weight in weights.items()}
        self._outputs: dict[str, _Factor] = {}
        self._inputs: dict[str, _Factor] = {}

    def add(self, records: Records, first: bool, weights: Tensor | None = None) -> None:
        """Add the outputs' factors and squares; at the first column the inputs' factors too."""
        for name, record in records.items():
            weight = self.weights[name]
            if _factored(record) and f"squares/{name}" not in self.sums:
                _check_size(name, weight)
                _add_outputs(record, self._sum(f"outputs/{name}", (len(weight),) * 2, weight))
                if first:
                    self._add_inputs(name, record, weights)
                continue
            beside = (
                self._names.get(id(record.beside)) if isinstance(record, VectorRecord) else None
            )
            if beside is not None and f"outputs/{beside}" in self.sums:  # its record came before
                self.biases[name] = beside
            else:
                record.write_to(self._sum(f"squares/{name}", weight.shape, weight), False)

    def _add_inputs(self, name: str, record: Record, weights: Tensor | None) -> None:
        weight = self.weights[name]
        if isinstance(record, ConvRecord) and is_plain(record):
            x = record.x
            if weights is not None:
                x = x * weights.sqrt().to(x).reshape(-1, 1, 1, 1)
            sums = self._sum(f"shifts/{name}", (PRODUCTS, x.shape[1], x.shape[1]), weight)
            add_products_of_shifts(x, sums, record.scratch)
            count = record.examples if weights is None else float(weights.sum())
            rows = count * x[0, 0].numel()
        else:
            sums = self._sum(f"inputs/{name}", (weight[0].numel(),) * 2, weight)
            rows = _add_inputs(record, sums, weights)
        if f"rows/{name}" not in self.sums:  # a tensor, for `reduce`
            self.sums[f"rows/{name}"] = sums.new_zeros((), dtype=torch.float64)
        self.sums[f"rows/{name}"] += rows

    def finish(self) -> None:
        """Compute the factors' eigenvalues, which take their place; weights that took no part have zeros."""
        for name, weight in self.weights.items():
            if f"shifts/{name}" in self.sums:
                inputs = self._sum(f"inputs/{name}", (weight[0].numel(),) * 2, weight)
                inputs += patch_products(self.sums.pop(f"shifts/{name}"))
            if f"inputs/{name}" in self.sums:
                rows = float(self.sums.pop(f"rows/{name}"))
                self._inputs[name] = _Factor.of(self.sums.pop(f"inputs/{name}").div_(rows))
                self._outputs[name] = _Factor.of(self.sums.pop(f"outputs/{name}"))
            elif name not in self.biases:
                self._sum(f"squares/{name}", weight.shape, weight)
        one = torch.ones(1, 1)
        for bias, name in self.biases.items():
            self._outputs[bias] = self._outputs[name]
            like = self.weights[bias]
            self._inputs[bias] = _Factor(one[0].double().to(like.device), one.to(like))

    def _precision(self, name: str, precision: Precision, scale: Tensor) -> Tensor:
        delta = precision[name]
        if name not in self._outputs:
            return scale * self.sums[f"squares/{name}"].double() + delta
        if delta.numel() != 1:
            raise ValueError(
                f"the prior has a precision for every entry of {name!r}, but a Kronecker-factored posterior "
                "takes one for a weight tensor: give one number, or use structure='diagonal'"
            )
        outputs, inputs = self._outputs[name].values, self._inputs[name].values
        return scale * torch.outer(outputs, inputs) + delta

    def log_det(self, precision: Precision, scale: Tensor) -> Tensor:
        """Return Σ log(s·λ_B ⊗ λ_A + δ)."""
        parts = [self._precision(n, precision, scale).log().sum() for n in self.weights]
        return torch.stack(parts).sum()

    def solve(self, precision: Precision, scale: Tensor) -> Solved:
        """Return the standard deviations in the eigenvectors' bases."""
        scales = {
            name: self._precision(name, precision, scale).rsqrt().to(weight.dtype)
            for name, weight in self.weights.items()
        }
        return _Solved(self._outputs, self._inputs, scales)


def _product(gradients: Tensor, vectors: Tensor) -> Tensor:
    """Return gradients @ vectors; at the layer that gives the outputs few columns are not 0."""
    used = gradients.any(0).nonzero().squeeze(1)
    if 2 * len(used) > len(vectors):
        return gradients @ vectors
    return gradients[:, used] @ vectors[used]


class _Solved(Solved):
    def __init__(
        self, outputs: dict[str, _Factor], inputs: dict[str, _Factor], scales: Weights
    ) -> None:
        super().__init__()
        self.outputs, self.inputs, self.scales = outputs, inputs, scales
        self.squares = {n: scales[n].square() for n in outputs if len(inputs[n].values) > 1}

    def rows(
        self, records: Records, names: Sequence[str], start: int, stop: int
    ) -> Iterator[Tensor | None]:
        for name in names:
            record = records.get(name)
            if record is None:
                yield None
            elif name in self.outputs:
                yield self._layer_rows(name, record, start, stop)
            else:
                yield diagonal_rows(self, name, record, self.scales[name], start, stop)

    def _layer_rows(self, name: str, record: Record, start: int, stop: int) -> Tensor:
        """Rotate the gradients into the basis, where the covariance is diagonal."""
        left, right, scale = (
            self.outputs[name].vectors, self.inputs[name].vectors, self.scales[name]
        )  # fmt: skip
        if isinstance(record, VectorRecord):  # a bias
            return _product(record.gradients[start:stop].flatten(1), left) * scale[:, 0]
        if isinstance(record, LinearRecord) and record.x.shape[1] == 1:
            square = self.squares.get(name)
            square = scale.square() if square is None else square
            spread = self.side(
                name, record, start, stop, lambda x: ((x @ right).square() @ square.t()).sqrt_()
            )
            return _product(record.g[start:stop, 0], left) * spread
        matrix = record.per_example(start, stop).flatten(2)
        return (left.t() @ matrix @ right).mul_(scale).flatten(1)

    def posterior(self, mean: Weights, **about: Any) -> KroneckerGaussian:
        factored = {n for n in self.outputs}
        return KroneckerGaussian(
            mean,
            {n: self.outputs[n].vectors for n in self.outputs},
            {n: self.inputs[n].vectors for n in self.outputs},
            std={n: s for n, s in self.scales.items() if n not in factored},
            scales={n: s for n, s in self.scales.items() if n in factored},
            **about,
        )
