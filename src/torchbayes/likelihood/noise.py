"""Real targets: outputs plus Gaussian or heavy-tailed noise of fixed, learned or predicted size."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal
from torch.distributions import StudentT as StudentTDistribution

from torchbayes.likelihood.base import at_least_single
from torchbayes.likelihood.observation import Observation
from torchbayes.predict.results import RegressionPredictive, like_predictions

__all__ = ["GaussianNoise", "StudentT"]


class _Noise(Observation):
    """Noise around the network's outputs whose size is fixed, learned or predicted.

    Arguments are not validated by torch's distributions: where training diverges, the loss is not finite,
    and `fit` says at which step and layer.
    """

    def __init__(self, scale: float, name: str, learned: bool, predicted: bool) -> None:
        super().__init__(self._distribution)
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"{name} is {scale:g}: expected a noise level above 0")
        if learned and predicted:
            raise ValueError("noise is either learned or predicted: choose one of the two")
        self.learned, self.predicted = learned, predicted
        self.log_std = nn.Parameter(torch.tensor(math.log(scale)), requires_grad=learned)

    @abstractmethod
    def _now(self, detached: bool) -> Callable[[Tensor], Distribution]:
        """Return the function from outputs to distributions with the current noise level."""

    def _distribution(self, outputs: Tensor) -> Distribution:
        return self._now(detached=False)(outputs)

    def predictive(self, outputs: Tensor) -> RegressionPredictive:
        """Return the mixture of the draws' distributions, with the current noise level."""
        return RegressionPredictive(outputs, self._now(detached=True))

    def arguments(self) -> dict[str, Any]:
        """Return how the noise level comes about; the level itself is a parameter."""
        return {"learned": self.learned, "predicted": self.predicted}

    @torch.no_grad()
    def pool(self, ends: Sequence[dict[str, Tensor]]) -> None:
        """Take the root mean square of the networks' noise levels.

        The variance of their mixture is the mean of their noise variances plus that of their predictions, so
        that it is the same as if each kept its own level.
        """
        super().pool(ends)
        if "log_std" in ends[0]:
            variances = torch.stack([2 * values["log_std"] for values in ends])
            self.log_std.copy_((variances.logsumexp(0) - math.log(len(ends))) / 2)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a `ValueError` if there is not one target for each predicted number."""
        place, _ = _location_scale(outputs, self.log_std, self.predicted)
        like_predictions(targets, torch.Size((len(targets), *place.shape[1:])))


def _level(parameter: Tensor, detached: bool) -> Tensor:
    return parameter.detach().clone() if detached else parameter


def _location_scale(outputs: Tensor, log_std: Tensor, predicted: bool) -> tuple[Tensor, Tensor]:
    """Return the location and the scale of the noise around it."""
    outputs = at_least_single(outputs)
    if not predicted:
        return outputs, log_std.exp().to(outputs).expand_as(outputs)
    if outputs.dim() < 2 or outputs.shape[-1] % 2:
        raise ValueError(
            f"predicted noise needs an even number of outputs, half of them log std, but the network "
            f"has {outputs.shape[-1] if outputs.dim() > 1 else 1}: give it twice as many outputs as targets"
        )
    place, log_scale = outputs.chunk(2, dim=-1)
    return place, log_scale.exp()


def _normal(outputs: Tensor, log_std: Tensor, predicted: bool) -> Normal:
    return Normal(*_location_scale(outputs, log_std, predicted), validate_args=False)


class GaussianNoise(_Noise):
    """Real targets with Gaussian noise of fixed, learned or predicted size.

    Args:
        std: Standard deviation of the noise, or its initial value if it is learned.
        learned: Learn one noise level together with the network.
        predicted: Split the network's last dimension into halves, the mean and the log of the noise's
            standard deviation, so that the noise may depend on the input.

    Example:
        >>> import torch, torchbayes as tb
        >>> y = torch.tensor([[1.0]])
        >>> round(tb.GaussianNoise(std=1.0).loss(y, y).item(), 4)   # ½ log 2π
        0.9189
    """

    def __init__(self, std: float = 1.0, *, learned: bool = False, predicted: bool = False) -> None:
        super().__init__(std, "std", learned, predicted)

    @property
    def std(self) -> Tensor:
        """The standard deviation of the noise, unless it is predicted."""
        return self.log_std.exp()

    def _now(self, detached: bool) -> Callable[[Tensor], Distribution]:
        return partial(_normal, log_std=_level(self.log_std, detached), predicted=self.predicted)


def _student_t(
    outputs: Tensor, log_std: Tensor, log_excess: Tensor, smallest: float, predicted: bool
) -> StudentTDistribution:
    place, scale = _location_scale(outputs, log_std, predicted)
    df = (smallest + log_excess.exp()).to(place).expand_as(place)
    return StudentTDistribution(df, place, scale, validate_args=False)


class StudentT(_Noise):
    """Real targets with Student-t noise: like Gaussian noise, but outliers are not surprising.

    Args:
        df: Degrees of freedom, the initial value if they are learned. The fewer, the heavier the tails: the
            standard deviation is infinite up to 2, and the noise nearly Gaussian from about 30.
        scale: Scale of the noise, or its initial value if it is learned.
        learned: Learn one scale together with the network.
        predicted: Split the network's last dimension into halves, the location and the log of the
            scale, so that the noise may depend on the input.
        learned_df: Learn the degrees of freedom too. They stay above 2, so that the variance is finite.

    Example:
        >>> import torch, torchbayes as tb
        >>> robust = tb.StudentT(df=4.0)
        >>> outlier = torch.tensor([[10.0]])
        >>> near = torch.zeros(1, 1)
        >>> bool(robust.loss(near, outlier) < tb.GaussianNoise().loss(near, outlier))
        True
    """

    def __init__(
        self,
        df: float = 4.0,
        scale: float = 1.0,
        *,
        learned: bool = False,
        predicted: bool = False,
        learned_df: bool = False,
    ) -> None:
        super().__init__(scale, "scale", learned, predicted)
        self._smallest_df = 2.0 if learned_df else 0.0
        if not (df > self._smallest_df and math.isfinite(df)):
            raise ValueError(
                f"df is {df:g}: expected degrees of freedom above {self._smallest_df:g}"
            )
        excess = torch.tensor(math.log(df - self._smallest_df))
        self.log_excess = nn.Parameter(excess, requires_grad=learned_df)

    @property
    def scale(self) -> Tensor:
        """The scale of the noise, unless it is predicted."""
        return self.log_std.exp()

    @property
    def df(self) -> Tensor:
        """The degrees of freedom."""
        return self._smallest_df + self.log_excess.exp()

    def arguments(self) -> dict[str, Any]:
        """Return how scale and degrees of freedom come about; they themselves are parameters."""
        return super().arguments() | {"learned_df": self._smallest_df > 0}

    def _now(self, detached: bool) -> Callable[[Tensor], Distribution]:
        return partial(
            _student_t, log_std=_level(self.log_std, detached),
            log_excess=_level(self.log_excess, detached), smallest=self._smallest_df,
            predicted=self.predicted,
        )  # fmt: skip
