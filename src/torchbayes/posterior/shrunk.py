"""A Gaussian with independent weights that is narrower in a few directions, those that data determine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.noise import normals_
from torchbayes.posterior.posterior import StoredPosterior, Weights, copied

__all__ = ["ShrunkGaussian"]


class ShrunkGaussian(StoredPosterior):
    """A Gaussian w = mean + std ∘ (ε − V (s ∘ Vᵀε)), where V has few, orthonormal columns.

    Its covariance is diag(std) (I − V diag(1 − (1 − s)²) Vᵀ) diag(std): that of the precision of a diagonal
    prior to which a matrix of low rank has been added. `LowRankGaussian` is the opposite: wider in a few
    directions.

    Args:
        mean: The means, and buffers if the draws share some.
        std: The standard deviations before shrinking. A weight that is not named here is deterministic.
        directions: For each of these weights a tensor of shape (rank, *weight.shape): the columns of V.
        shrinkage: s, of shape (rank,), between 0 and 1.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.

    Example:
        >>> import torch, torchbayes as tb
        >>> one = {"w": torch.ones(2)}
        >>> q = tb.posterior.ShrunkGaussian(one, one, {"w": torch.tensor([[1.0, 0.0]])}, torch.tensor([1.0]))
        >>> q.sample()["w"][0].item()   # wholly determined
        1.0
    """

    kind = "shrunk-gaussian"

    def __init__(
        self, mean: Weights, std: Weights, directions: Weights, shrinkage: Tensor, *,
        model_name: str = "", rest: str = "",
    ) -> None:  # fmt: skip
        super().__init__(mean, model_name, rest)
        self._std, self._directions = copied(std), copied(directions)
        self._shrinkage = shrinkage.detach().clone()
        if self._std.keys() != self._directions.keys() or not self._std.keys() <= mean.keys():
            raise ValueError(
                "mean, std and directions name different weights: give std and directions of the same "
                "ones, and the mean of all"
            )
        for name, each in self._directions.items():
            if tuple(each.shape) != (len(shrinkage), *mean[name].shape):
                raise ValueError(
                    f"directions of {name!r} have shape {tuple(each.shape)}: expected (rank, *shape of the "
                    f"mean), {(len(shrinkage), *mean[name].shape)}"
                )

    @property
    def rank(self) -> int:
        """The number of directions."""
        return len(self._shrinkage)

    def std(self) -> Weights:
        """Return the marginal standard deviations of the weights that have one."""
        lost = 1 - (1 - self._shrinkage).square()
        return {
            name: std * (1 - torch.tensordot(lost, self._directions[name].square(), 1)).clamp_min(0).sqrt()
            for name, std in self._std.items()
        }  # fmt: skip

    def _random(self) -> Iterable[str]:
        return self._std

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Draw mean + std ∘ (ε − V (s ∘ Vᵀε))."""
        draw = self.mean()
        noise = {name: torch.empty_like(std) for name, std in self._std.items()}
        normals_(list(noise.values()), generator)
        along = torch.zeros_like(self._shrinkage)
        for name, each in noise.items():
            along += self._directions[name].flatten(1) @ each.reshape(-1)
        along *= self._shrinkage
        for name, each in noise.items():
            each -= torch.tensordot(along, self._directions[name], 1)
            draw[name].addcmul_(each, self._std[name])
        return draw

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {
            "mean": self._mean, "std": self._std, "directions": self._directions,
            "shrinkage": {"shrinkage": self._shrinkage},
        }  # fmt: skip

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> ShrunkGaussian:
        return cls(
            groups["mean"], groups["std"], groups["directions"], groups["shrinkage"]["shrinkage"]
        )
