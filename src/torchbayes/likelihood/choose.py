"""Which likelihood an argument, a loss of torch or the targets themselves denote."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor, nn
from torch.distributions import Distribution

from torchbayes.likelihood.base import Likelihood
from torchbayes.likelihood.bernoulli import Bernoulli
from torchbayes.likelihood.categorical import Categorical
from torchbayes.likelihood.noise import GaussianNoise
from torchbayes.likelihood.observation import Observation
from torchbayes.likelihood.poisson import Poisson

__all__ = ["as_likelihood", "inferred_likelihood"]

# Losses of torch that do not say all that a likelihood does.
_UNSAID = {
    nn.MSELoss: (
        "MSELoss is not a likelihood because it does not say how large the noise is: "
        "use torchbayes.GaussianNoise(std=…) or GaussianNoise(learned=True)"
    ),
    nn.GaussianNLLLoss: (
        "GaussianNLLLoss takes means and variances apart: use torchbayes.GaussianNoise(predicted=True), "
        "for a network that gives means and log standard deviations side by side"
    ),
    nn.BCELoss: (
        "BCELoss takes probabilities: leave out the network's sigmoid and use torchbayes.Bernoulli()"
    ),
    nn.NLLLoss: (
        "NLLLoss takes log-probabilities: use torchbayes.Categorical(), which gives the same loss with or "
        "without the network's log-softmax"
    ),
}


def as_likelihood(value: Likelihood | nn.Module | Callable[[Tensor], Distribution]) -> Likelihood:
    """Return the likelihood that a `likelihood` argument denotes.

    Args:
        value: A `Likelihood`; `nn.CrossEntropyLoss`, `nn.BCEWithLogitsLoss` or `nn.PoissonNLLLoss`; or a
            function from outputs to a distribution. A loss's weights become those of the likelihood, which
            divides by the number of examples rather than by the sum of the weights or the number of labels.
    """
    if isinstance(value, Likelihood):
        return value
    if isinstance(value, nn.CrossEntropyLoss):
        _check_mean(value)
        if value.label_smoothing:
            raise ValueError(
                f"a CrossEntropyLoss with label_smoothing={value.label_smoothing:g} is not a likelihood of "
                "the data, because it scores labels that were not observed: leave it out"
            )
        ignored = None if value.ignore_index == -100 else value.ignore_index
        return Categorical(ignored, value.weight)
    if isinstance(value, nn.BCEWithLogitsLoss):
        _check_mean(value)
        if value.weight is not None:
            raise ValueError(
                "BCEWithLogitsLoss(weight=…) weighs the examples of one batch: use torchbayes.Bernoulli() "
                "and give fit(…, weights=…), or Bernoulli(positive_weight=…) for rare labels"
            )
        return Bernoulli(value.pos_weight)
    if isinstance(value, nn.PoissonNLLLoss):
        _check_mean(value)
        if not value.log_input:
            raise ValueError(
                "PoissonNLLLoss(log_input=False) takes rates: let the network give their logarithm and use "
                "torchbayes.Poisson()"
            )
        return Poisson()
    for kind, reason in _UNSAID.items():
        if isinstance(value, kind):
            raise ValueError(reason)
    if isinstance(value, nn.Module) or not callable(value):
        raise TypeError(
            f"cannot use {type(value).__name__} as a likelihood: pass torchbayes.Categorical(), Bernoulli(), "
            "GaussianNoise(…), Poisson(), StudentT(…), or a function from outputs to a torch distribution"
        )
    return Observation(value)


def _check_mean(loss: nn.Module) -> None:
    if loss.reduction != "mean":
        raise ValueError(
            f'{type(loss).__name__}(reduction="{loss.reduction}") is not a mean: leave out reduction, '
            "because the library multiplies by train_size itself"
        )


def inferred_likelihood(outputs: Tensor, targets: Tensor | None) -> Likelihood:
    """Return the likelihood that targets and outputs suggest, with a warning where it is a guess.

    Whole numbers are classes, or binary labels if the network has one logit for each; real numbers have
    Gaussian noise of learned size, unless all of them are 0 or 1, which are binary labels.

    Args:
        outputs: The network's outputs for some examples.
        targets: The targets of all examples that are at hand.

    Raises:
        ValueError: If the targets are one-hot, which could be classes or binary labels, or class labels as
            real numbers.

    Example:
        >>> import torch
        >>> inferred_likelihood(torch.zeros(2, 1), torch.tensor([0, 1, 1]))
        Bernoulli()
    """
    if targets is None:
        return Categorical()
    one_each = _sizes(outputs) == _sizes(targets)
    real = targets.is_floating_point()
    if not one_each or not bool(((targets == 0) | (targets == 1)).all()):
        if (
            real
            and targets[0].numel() == 1
            and outputs.dim() == 2
            and _are_labels(targets, outputs)
        ):
            raise ValueError(
                f"the targets are {targets.dtype} but whole, and the network has {outputs.shape[1]} outputs: "
                "if they are classes, pass targets.long(), one for each example; if they are numbers, give "
                "the network one output, or pass the likelihood"
            )
        return GaussianNoise(learned=True) if real else Categorical()
    several = targets.dim() == 2 and targets.shape[1] > 1
    if several and bool((targets.sum(1) == 1).all()):
        raise ValueError(
            f"the targets, {targets.dtype} of shape {tuple(targets.shape)}, look like one-hot classes: "
            "pass targets.argmax(1), or likelihood=torchbayes.Bernoulli() for labels that do not exclude "
            "each other"
        )
    if real or several:
        warnings.warn(
            "all targets are 0 or 1, so they are taken as binary labels: pass "
            "likelihood=torchbayes.Bernoulli() to confirm, or GaussianNoise(learned=True) if they are "
            "numbers",
            stacklevel=4,  # the caller of fit
        )
    return Bernoulli()


def _are_labels(targets: Tensor, outputs: Tensor) -> bool:
    """Whether all targets are numbers of the network's outputs, if there are several."""
    known = (targets >= 0) & (targets < outputs.shape[1]) & (targets == targets.round())
    return outputs.shape[1] > 1 and bool(known.all())


def _sizes(tensor: Tensor) -> list[int]:
    """Return the sizes of an example's dimensions that are not 1."""
    return [size for size in tensor.shape[1:] if size != 1]
