"""A Gaussian over the weight matrix of a layer whose rows, its outputs, are independent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchbayes.core.noise import normal_
from torchbayes.posterior.kronecker import set_matrix
from torchbayes.posterior.posterior import StoredPosterior, Weights, copied

__all__ = ["RowGaussian"]


class RowGaussian(StoredPosterior):
    """A Gaussian for every output of a layer, w_k = m_k + σ_k ∘ ε_k + A_k ζ_k with standard normal ε, ζ.

    The rows of a layer's weight are its outputs k; the columns its inputs and, if it has one, its bias. The
    outputs are independent of each other. With as many columns in A_k as in the weight, the covariance of an
    output is dense (A_k a Cholesky factor, no σ); with fewer, it is a diagonal plus a low rank.

    Args:
        mean: The means, and buffers if the draws share some.
        factors: A by the layer's weight name, of shape (outputs, columns, rank).
        biases: The name of the bias in the last column, by weight name, for layers with a bias.
        std: The standard deviations σ. A weight that is named nowhere is deterministic.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.

    Example:
        >>> import torch
        >>> from torchbayes.posterior import RowGaussian
        >>> q = RowGaussian({"weight": torch.zeros(2, 3)}, {"weight": torch.eye(3).expand(2, 3, 3)})
        >>> q.sample(torch.Generator().manual_seed(0))["weight"].shape
        torch.Size([2, 3])
    """

    kind = "row-gaussian"

    def __init__(
        self, mean: Weights, factors: Weights, biases: Mapping[str, str] | None = None,
        std: Weights | None = None, *, model_name: str = "", rest: str = "",
    ) -> None:  # fmt: skip
        super().__init__(mean, model_name, rest)
        self._factors, self._biases, self._std = (
            copied(factors),
            dict(biases or {}),
            copied(std or {}),
        )
        for name in [*self._factors, *self._biases, *self._biases.values(), *self._std]:
            if name not in self._mean:
                raise ValueError(f"weight {name!r} has a spread but no mean: name the same weights")
        for name, factor in self._factors.items():
            rows = len(self._mean[name])
            columns = self._mean[name][0].numel() + (name in self._biases)
            if factor.dim() != 3 or factor.shape[:2] != (rows, columns):
                raise ValueError(
                    f"the factor of layer {name!r} has shape {tuple(factor.shape)}: expected ({rows}, "
                    f"{columns}, rank)"
                )

    def std(self) -> Weights:
        """Return the marginal standard deviations of the weights that have one."""
        variance = {name: std.square() for name, std in self._std.items()}
        for name, factor in self._factors.items():
            for own, part in self._split(name, factor.square().sum(2)).items():
                variance[own] = variance[own] + part if own in variance else part
        return {name: value.sqrt() for name, value in variance.items()}

    def _random(self) -> Iterable[str]:
        return self._factors.keys() | self._std.keys() | set(self._biases.values())

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Draw m_k + σ_k ∘ ε_k + A_k ζ_k for every output k."""
        draw = self.mean()
        for name, std in self._std.items():
            draw[name].addcmul_(normal_(torch.empty_like(std), generator), std)
        for name, factor in self._factors.items():
            noise = normal_(factor.new_empty(len(factor), factor.shape[2], 1), generator)
            for own, part in self._split(name, (factor @ noise).squeeze(2)).items():
                draw[own] += part
        return draw

    def _split(self, name: str, matrix: torch.Tensor) -> Weights:
        """Return the columns of a layer's matrix by the names of its weights."""
        names = [name, self._biases[name]] if name in self._biases else [name]
        own = {n: torch.empty_like(self._mean[n]) for n in names}
        set_matrix(matrix, *own.values())
        return own

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._mean, "factors": self._factors, "std": self._std}

    def _file_settings(self) -> dict[str, Any]:
        return {"biases": self._biases}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> RowGaussian:
        biases = {str(weight): str(bias) for weight, bias in settings["biases"].items()}
        return cls(groups["mean"], groups.get("factors", {}), biases, groups.get("std", {}))
