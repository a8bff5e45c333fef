"""Likelihoods: how a network's outputs define a distribution of the targets, for the loss and predictions.

Every likelihood's `loss` is the *mean* negative log-likelihood of a batch, per example, as the methods
expect. The terms of several outputs per example are summed, not averaged, because the likelihood of an
example is their product.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from torchbayes.predict.results import (
    ClassPredictive,
    Predictive,
    RegressionPredictive,
    like_predictions,
)

__all__ = ["Categorical", "GaussianNoise", "Likelihood", "Observation", "as_likelihood"]


class Likelihood(nn.Module, ABC):
    """A distribution of the targets given the network's outputs.

    It is a module so that its own parameters, such as a learned noise level, are moved and saved too.
    """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of a batch, in nats per example."""

    @abstractmethod
    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the prediction from outputs of shape (draws, examples, …)."""


def _check_classes(shape: torch.Size) -> None:
    if not shape or shape[0] < 2:
        raise ValueError(
            f"the network gives outputs of shape {tuple(shape)} per example, but class logits are at least "
            "2: pass likelihood=torchbayes.GaussianNoise(…) for regression, or give it an output per class"
        )


class Categorical(Likelihood):
    """One of several classes, from logits: (examples, classes, …) as `cross_entropy` orders them.

    Example:
        >>> import torch, torchbayes as tb
        >>> logits = torch.zeros(2, 4)
        >>> round(tb.Categorical().loss(logits, torch.tensor([0, 3])).item(), 4)   # log 4
        1.3863
    """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy, summed over the positions of an example if it has several."""
        _check_classes(outputs.shape[1:])
        if outputs.dim() == 2:
            return F.cross_entropy(outputs, targets)
        return F.cross_entropy(outputs, targets, reduction="sum") / len(outputs)

    def predictive(self, outputs: Tensor) -> ClassPredictive:
        """Average probabilities, not logits."""
        _check_classes(outputs.shape[2:])
        probs = outputs.float().softmax(2) if outputs.dtype.itemsize < 4 else outputs.softmax(2)
        aleatoric = torch.special.entr(probs).sum(2).mean(0)
        return ClassPredictive(probs.mean(0), aleatoric, len(outputs))


class Observation(Likelihood):
    """Any likelihood: a function from the network's outputs to a `torch.distributions.Distribution`.

    Args:
        distribution: Function from outputs of shape (examples, …) to a distribution whose samples have the
            targets' shape.

    Example:
        >>> import torch, torchbayes as tb
        >>> counts = tb.likelihood.Observation(lambda out: torch.distributions.Poisson(out.exp()))
        >>> round(counts.loss(torch.zeros(3, 1), torch.ones(3, 1)).item(), 4)
        1.0
    """

    def __init__(self, distribution: Callable[[Tensor], Distribution]) -> None:
        super().__init__()
        self._of = distribution

    def distribution(self, outputs: Tensor) -> Distribution:
        """Return the distribution of the targets."""
        result = self._of(outputs)
        if not isinstance(result, Distribution):
            raise TypeError(
                f"the likelihood's function gives a {type(result).__name__} but must give a "
                "torch.distributions.Distribution of the targets"
            )
        return result

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over examples of −log p(targets | outputs)."""
        distribution = self.distribution(outputs)
        shape = distribution.batch_shape + distribution.event_shape
        log_prob = distribution.log_prob(like_predictions(targets, shape).to(outputs.dtype))
        return -log_prob.sum() / len(outputs)

    def predictive(self, outputs: Tensor) -> RegressionPredictive:
        """Return the mixture of the draws' distributions."""
        return RegressionPredictive(outputs, self.distribution)


class GaussianNoise(Observation):
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
        super().__init__(self._normal)
        if not (std > 0 and math.isfinite(std)):
            raise ValueError(f"std is {std:g}: expected a noise level above 0")
        if learned and predicted:
            raise ValueError("noise is either learned or predicted: choose one of the two")
        self.learned, self.predicted = learned, predicted
        self.log_std = nn.Parameter(torch.tensor(math.log(std)), requires_grad=learned)

    @property
    def std(self) -> Tensor:
        """The standard deviation of the noise, unless it is predicted."""
        return self.log_std.exp()

    def predictive(self, outputs: Tensor) -> RegressionPredictive:
        """Return the mixture of the draws' distributions, with the current noise level."""
        now = GaussianNoise(predicted=self.predicted)
        now.log_std = nn.Parameter(self.log_std.detach().clone(), requires_grad=False)
        return RegressionPredictive(outputs, now.distribution)

    def _normal(self, outputs: Tensor) -> Normal:
        if not self.predicted:
            return Normal(outputs, self.std.to(outputs).expand_as(outputs))
        if outputs.shape[-1] % 2:
            raise ValueError(
                f"predicted noise needs an even number of outputs, half of them log std, but the network "
                f"has {outputs.shape[-1]}: give it twice as many outputs as targets"
            )
        mean, log_std = outputs.chunk(2, dim=-1)
        return Normal(mean, log_std.exp())


def as_likelihood(value: Likelihood | nn.Module | Callable[[Tensor], Distribution]) -> Likelihood:
    """Return the likelihood that a `likelihood` argument denotes.

    Args:
        value: A `Likelihood`; `nn.CrossEntropyLoss()`; or a function from outputs to a distribution.
    """
    if isinstance(value, Likelihood):
        return value
    if isinstance(value, nn.CrossEntropyLoss):
        plain = value.weight is None and not value.label_smoothing and value.ignore_index == -100
        if not plain or value.reduction != "mean":
            raise ValueError(
                "a CrossEntropyLoss with weights, label smoothing, an ignored class or a sum is not a "
                "likelihood of the data: use torchbayes.Categorical()"
            )
        return Categorical()
    if isinstance(value, nn.MSELoss):
        raise ValueError(
            "MSELoss is not a likelihood because it does not say how large the noise is: "
            "use torchbayes.GaussianNoise(std=…) or GaussianNoise(learned=True)"
        )
    if isinstance(value, nn.Module) or not callable(value):
        raise TypeError(
            f"cannot use {type(value).__name__} as a likelihood: pass torchbayes.Categorical(), "
            "GaussianNoise(…), or a function from outputs to a torch distribution"
        )
    return Observation(value)
