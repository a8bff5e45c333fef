"""The prediction of a regression whose outputs are Gaussian under the posterior: no draws are needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Normal

from torchbayes.core.noise import normal_
from torchbayes.predict.results import Predictive, RegressionPredictive, like_predictions

__all__ = ["GaussianPredictive"]


class GaussianPredictive(RegressionPredictive):
    """N(mean, covariance + noise²): a Gaussian over the outputs and Gaussian noise, added exactly.

    Args:
        mean: The mean of the outputs, (examples, …).
        variance: Their variance under the posterior, which more data would remove: like the mean if an
            example's outputs are independent, otherwise their covariance, (examples, outputs, outputs).
        noise_std: The standard deviation of the noise, one number or like the outputs.

    Example:
        >>> import torch
        >>> p = GaussianPredictive(torch.zeros(1, 1), torch.full((1, 1), 9.0), torch.tensor(4.0))
        >>> p.epistemic.item(), p.aleatoric.item(), p.std.item()
        (3.0, 4.0, 5.0)
    """

    def __init__(self, mean: Tensor, variance: Tensor, noise_std: Tensor) -> None:
        self.covariance = None if variance.shape == mean.shape else variance
        if self.covariance is not None:
            variance = variance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
        self._variance = variance.clamp_min(0)
        self._noise = noise_std.to(mean).expand_as(mean)
        super().__init__(mean.unsqueeze(0), self._observed)

    def _observed(self, outputs: Tensor) -> Normal:
        return Normal(outputs, self.std)

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

    def _root(self, covariance: Tensor) -> Tensor:
        """Return the Cholesky factors of the covariances of new observations."""
        noise = torch.diag_embed(self._noise.square().flatten(1))
        root: Tensor = torch.linalg.cholesky(covariance + noise)
        return root

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the joint log-density of each example's targets."""
        if self.covariance is None:
            return super().log_prob(targets)
        mean = self.outputs[0]
        off = (like_predictions(targets, mean.shape) - mean).flatten(1).to(mean)
        root = self._root(self.covariance)
        white = torch.linalg.solve_triangular(root, off.unsqueeze(2), upper=False).squeeze(2)
        log_det = root.diagonal(dim1=1, dim2=2).log().sum(1)
        normaliser = log_det + 0.5 * off.shape[1] * math.log(2 * math.pi)
        density: Tensor = -0.5 * white.square().sum(1) - normaliser
        return density

    def sample(self, count: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw new observations, (count, examples, …)."""
        mean = self.outputs[0]
        noise = normal_(mean.new_empty(count, *mean.shape), generator)
        if self.covariance is None:
            return mean + self.std * noise
        off = torch.einsum("nij,snj->sni", self._root(self.covariance), noise.flatten(2))
        return mean + off.view_as(noise)

    @property
    def _spread(self) -> Tensor:
        return self._variance if self.covariance is None else self.covariance

    def rescaled(self, shift: float | Tensor, scale: float | Tensor) -> GaussianPredictive:
        """Return the prediction of scale · y + shift, in float64: such as a target in its own units.

        Args:
            shift: Number that is added.
            scale: Positive number to multiply by first.
        """
        mean = self.outputs[0].double() * scale + shift
        return GaussianPredictive(
            mean, self._spread.double() * scale**2, self._noise.double() * scale
        )

    def merge(self, other: Predictive) -> RegressionPredictive:
        """Refuse: there are no draws to add more to."""
        raise ValueError(
            "this prediction is exact, not made of draws, so there is nothing to merge: use it as it is, or "
            "draw from the posterior with torchbayes.predictive"
        )

    def subset(self, index: Tensor) -> GaussianPredictive:
        """Return the predictions of the examples at `index`, in its order."""
        return GaussianPredictive(self.outputs[0][index], self._spread[index], self._noise[index])

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
        return GaussianPredictive(mean, torch.cat([part._spread for part in own]), noise)
