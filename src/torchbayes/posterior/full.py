"""A Gaussian over a few weights with all of their correlations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.noise import normal_
from torchbayes.posterior.posterior import StoredPosterior, Weights

__all__ = ["FullGaussian", "flattened", "unflattened"]


def flattened(weights: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Concatenate the named weights into one vector."""
    return torch.cat([weights[name].reshape(-1) for name in names])


def unflattened(vector: Tensor, like: Mapping[str, Tensor], names: Sequence[str]) -> Weights:
    """Split a vector, or each row of a matrix, into tensors of the shapes of the named weights."""
    parts = vector.split([like[name].numel() for name in names], dim=-1)
    rows = vector.shape[:-1]
    return {
        name: part.reshape(*rows, *like[name].shape)
        for name, part in zip(names, parts, strict=True)
    }


class FullGaussian(StoredPosterior):
    """A Gaussian w = mean + L ε over some weights, with any covariance L Lᵀ.

    Args:
        mean: The means, and buffers if the draws share some.
        names: The weights with a spread, in the order of the rows of L. Any other is deterministic.
        root: L, a root of the covariance.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.

    Example:
        >>> import torch, torchbayes as tb
        >>> root = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> q = tb.posterior.FullGaussian({"w": torch.zeros(2)}, ["w"], root)
        >>> w = q.sample()["w"]
        >>> bool(w[0] == w[1])   # perfectly correlated
        True
    """

    kind = "full-gaussian"

    def __init__(
        self, mean: Weights, names: Sequence[str], root: Tensor, *, model_name: str = "",
        rest: str = "",
    ) -> None:  # fmt: skip
        super().__init__(mean, model_name, rest)
        self.names, self._root = list(names), root.detach().clone()
        for name in self.names:
            if name not in self._mean:
                raise ValueError(f"weight {name!r} has a spread but no mean: name the same weights")
        count = sum(self._mean[name].numel() for name in self.names)
        if tuple(root.shape) != (count, count):
            raise ValueError(
                f"the root has shape {tuple(root.shape)}: expected ({count}, {count}), a row for each of the "
                "named weights"
            )

    def std(self) -> Weights:
        """Return the marginal standard deviations of the weights that have one."""
        marginal: Tensor = torch.linalg.vector_norm(self._root, dim=1)
        return unflattened(marginal, self._mean, self.names)

    def covariance(self) -> Tensor:
        """Return L Lᵀ, in the order of `names`."""
        return self._root @ self._root.t()

    def _random(self) -> Iterable[str]:
        return self.names

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Draw mean + L ε."""
        draw = self.mean()
        noise = normal_(self._root.new_empty(len(self._root)), generator)
        for name, shift in unflattened(self._root @ noise, self._mean, self.names).items():
            draw[name] += shift
        return draw

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._mean, "root": {"root": self._root}}

    def _file_settings(self) -> dict[str, Any]:
        return {"names": self.names}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> FullGaussian:
        return cls(groups["mean"], [str(n) for n in settings["names"]], groups["root"]["root"])
