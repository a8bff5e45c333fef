"""The prediction of a regression whose outputs are Gaussian under the posterior: no draws are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Normal

from torchbayes.predict.results import Predictive, RegressionPredictive

__all__ = ["GaussianPredictive"]


class GaussianPredictive(RegressionPredictive):
    """N(mean, variance + noise²): a Gaussian over the outputs and Gaussian noise, added exactly.

    Args:
        mean: The mean of the outputs, (examples, …).
        variance: Their variance under the posterior: what more data would remove.
        noise_std: The standard deviation of the noise, one number or like the outputs.
    """

    def __init__(self, mean: Tensor, variance: Tensor, noise_std: Tensor) -> None:
        self._variance, self._noise = variance, noise_std.to(mean).expand_as(mean)
        super().__init__(mean.unsqueeze(0), self._observed)

    def _observed(self, outputs: Tensor) -> Normal:
        return Normal(outputs, (self._variance + self._noise.square()).sqrt())

    @property
    def std(self) -> Tensor:
        """The standard deviation of a new observation: noise and uncertainty about the weights combined."""
        return (self._variance + self._noise.square()).sqrt()

    @property
    def aleatoric(self) -> Tensor:
        """The standard deviation of the noise."""
        return self._noise

    @property
    def epistemic(self) -> Tensor:
        """The standard deviation of the outputs under the posterior."""
        return self._variance.sqrt()

    def merge(self, other: Predictive) -> RegressionPredictive:
        """Refuse: there are no draws to add more to."""
        raise ValueError(
            "this prediction is exact, not made of draws, so there is nothing to merge: use it as it is"
        )

    @staticmethod
    def cat(parts: Sequence[Predictive]) -> GaussianPredictive:
        """Concatenate the rows of all parts."""
        own = [part for part in parts if isinstance(part, GaussianPredictive)]
        if not own or len(own) != len(parts):
            raise ValueError(
                f"cannot join these {len(parts)} predictions: they must be of one kind"
            )
        mean = torch.cat([part.outputs[0] for part in own])
        noise = torch.cat([part._noise for part in own])
        return GaussianPredictive(mean, torch.cat([part._variance for part in own]), noise)
