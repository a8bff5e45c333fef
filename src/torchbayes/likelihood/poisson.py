"""Counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Poisson as PoissonDistribution

from torchbayes.likelihood.base import at_least_single, mean_nll
from torchbayes.likelihood.observation import Observation
from torchbayes.predict.results import RegressionPredictive, like_predictions

__all__ = ["Poisson"]


def _counts(outputs: Tensor) -> PoissonDistribution:
    return PoissonDistribution(outputs.exp(), validate_args=False)


class Poisson(Observation):
    """Counts 0, 1, 2, … from the logarithm of their rate, one output per count.

    For counts over different times or areas, add the logarithm of each to the network's output.

    Example:
        >>> import torch, torchbayes as tb
        >>> round(tb.Poisson().loss(torch.zeros(3, 1), torch.ones(3, 1)).item(), 4)
        1.0
        >>> p = tb.Poisson().predictive(torch.tensor([[[0.0]], [[2.0]]]))   # two draws, rates 1 and 7.4
        >>> p.quantile(0.5).item()
        3.0
    """

    def __init__(self) -> None:
        super().__init__(_counts)

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean over examples of rate − count · log rate + log count!."""
        outputs = at_least_single(outputs)
        counts = _checked(like_predictions(targets, outputs.shape)).to(outputs.dtype)
        return mean_nll(outputs.exp() - counts * outputs + torch.lgamma(counts + 1), weights)

    def predictive(self, outputs: Tensor) -> RegressionPredictive:
        """Return the mixture of the draws' Poisson distributions."""
        return RegressionPredictive(at_least_single(outputs), _counts)

    def arguments(self) -> dict[str, Any]:
        """Return nothing: there are none."""
        return {}

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a `ValueError` if the targets are not one count for each output."""
        _checked(like_predictions(targets, torch.Size((len(targets), *outputs.shape[1:]))))


def _checked(targets: Tensor) -> Tensor:
    bad = (
        (targets < 0) | (targets != targets.round()) if targets.is_floating_point() else targets < 0
    )
    if bool(bad.any()):
        raise ValueError(
            f"targets contain {targets[bad][0].item():g}, which is no count: give whole numbers of at "
            "least 0, or pass another likelihood, such as GaussianNoise(learned=True)"
        )
    return targets
