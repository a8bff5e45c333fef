"""Gaussians over the weights: independent, and with a few directions in which they move together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.noise import gaussians_, normal_
from torchbayes.posterior.posterior import StoredPosterior, Weights, copied, lent

__all__ = ["Gaussian", "LowRankGaussian"]


def _empty_like(tensor: Tensor) -> Tensor:
    # Contiguous, whatever the tensor's memory format, so that a draw depends on the numbers alone.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _check_std(mean: Weights, std: Weights) -> None:
    for name, value in std.items():
        if name not in mean:
            raise ValueError(
                f"std has a weight {name!r} that mean does not have: name the same weights"
            )
        if value.shape != mean[name].shape:
            raise ValueError(
                f"std of {name!r} has shape {tuple(value.shape)} but its mean has "
                f"{tuple(mean[name].shape)}: give one standard deviation per weight"
            )
        if not (value.is_floating_point() and mean[name].is_floating_point()):
            raise ValueError(
                f"std of {name!r} is given but the weight is of type {mean[name].dtype}, its std of "
                f"{value.dtype}: only real numbers can be drawn, so leave it out of std"
            )
    # Together: on an accelerator every look is a wait.
    if _all(_fine(value).all() for value in std.values()):
        return
    for name, value in std.items():
        odd = value[~_fine(value)]
        if odd.numel():
            raise ValueError(
                f"std of {name!r} has the entry {odd[0].item():g}: standard deviations are finite and at "
                "least 0"
            )


def _fine(std: Tensor) -> Tensor:
    return (std >= 0) & (std < torch.inf)


def _all(flags: Iterable[Tensor]) -> bool:
    """Whether all of some flags hold, with one look at each device."""
    places: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        places.setdefault(flag.device, []).append(flag)
    return all(bool(torch.stack(some).all()) for some in places.values())


class Gaussian(StoredPosterior):
    """An independent Gaussian for every weight.

    Args:
        mean: The means, and buffers if the draws share some.
        std: The standard deviations. A weight that is not named here is deterministic.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.

    Example:
        >>> import torch, torchbayes as tb
        >>> q = tb.Gaussian({"weight": torch.zeros(1, 3)}, {"weight": torch.ones(1, 3)})
        >>> q.sample(torch.Generator().manual_seed(0))["weight"].shape
        torch.Size([1, 3])
    """

    kind = "gaussian"

    def __init__(
        self, mean: Weights, std: Weights, *, model_name: str = "", rest: str = ""
    ) -> None:
        _check_std(mean, std)
        super().__init__(mean, model_name, rest)
        self._std = copied(std)

    def std(self) -> Weights:
        """Return the standard deviations of the weights that have one."""
        return copied(self._std)

    def _random(self) -> Iterable[str]:
        return self._std

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Draw mean + std · ε."""
        draw = {
            name: _empty_like(mean) if name in self._std else torch.empty_like(mean)
            for name, mean in self._mean.items()
        }
        self._fill(draw, generator)
        return draw

    def _fill(self, draw: Weights, generator: torch.Generator | None) -> None:
        for name in self._mean.keys() - self._std.keys():
            draw[name].copy_(self._mean[name])
        random = [name for name in self._mean if name in self._std]
        drawn, means, stds = ([of[n] for n in random] for of in (draw, self._mean, self._std))
        gaussians_(drawn, means, stds, generator)

    def _lent(
        self, count: int, generator: torch.Generator | None, *, reuse: bool
    ) -> Iterator[Weights]:
        if type(self) is not Gaussian or not reuse:  # a subclass may draw differently
            yield from self.draws(count, generator)
            return
        draw = self.sample(generator)
        yield lent(draw)
        for _ in range(count - 1):
            self._fill(draw, generator)
            yield lent(draw)

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._mean, "std": self._std}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Gaussian:
        return cls(groups["mean"], groups.get("std", {}))


class LowRankGaussian(StoredPosterior):
    """A Gaussian with covariance diag(std²) + D Dᵀ, where D has few columns.

    Args:
        mean: The means, and buffers if the draws share some.
        std: The standard deviations of the diagonal part; a weight that is not named has none.
        factors: For each weight a tensor of shape (rank, *weight.shape): the columns of D, already
            scaled. One set of `rank` normal numbers moves all weights together.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.

    Example:
        >>> import torch, torchbayes as tb
        >>> mean = {"weight": torch.zeros(3)}
        >>> q = tb.LowRankGaussian(mean, {"weight": torch.zeros(3)}, {"weight": torch.ones(1, 3)})
        >>> w = q.sample()["weight"]
        >>> bool((w == w[0]).all())   # one direction only: the three weights move together
        True
    """

    kind = "low-rank-gaussian"

    def __init__(
        self, mean: Weights, std: Weights, factors: Weights, *, model_name: str = "",
        rest: str = "",
    ) -> None:  # fmt: skip
        _check_std(mean, std)
        for name, factor in factors.items():
            if not factor.dim() or name not in mean or factor.shape[1:] != mean[name].shape:
                raise ValueError(
                    f"factor {name!r} has shape {tuple(factor.shape)}: expected (rank, *shape of the mean)"
                )
        ranks = {factor.shape[0] for factor in factors.values()}
        if len(ranks) > 1:
            raise ValueError(f"factors have ranks {sorted(ranks)}: give every weight the same rank")
        super().__init__(mean, model_name, rest)
        self._std, self._factors = copied(std), copied(factors)
        self.rank = ranks.pop() if ranks else 0

    def std(self) -> Weights:
        """Return the marginal standard deviations: the root of the covariance's diagonal."""
        result: Weights = {}
        for name in self._mean:
            if name not in self._std and name not in self._factors:
                continue
            variance = torch.zeros_like(self._mean[name])
            if name in self._std:
                variance += self._std[name].square()
            if name in self._factors:
                variance += self._factors[name].square().sum(0)
            result[name] = variance.sqrt_()
        return result

    def _random(self) -> Iterable[str]:
        return self._std.keys() | self._factors.keys()

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Draw mean + std · ε + D ζ."""
        coefficients: Tensor | None = None
        draw: Weights = {}
        for name, mean in self._mean.items():
            value = mean.clone()
            std, factor = self._std.get(name), self._factors.get(name)
            if std is not None:
                value.addcmul_(normal_(_empty_like(mean), generator), std)
            if factor is not None:
                if coefficients is None:
                    coefficients = normal_(factor.new_empty(self.rank), generator)
                value += torch.tensordot(coefficients.to(factor), factor, dims=1)
            draw[name] = value
        return draw

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._mean, "std": self._std, "factors": self._factors}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> LowRankGaussian:
        return cls(groups["mean"], groups.get("std", {}), groups.get("factors", {}))
