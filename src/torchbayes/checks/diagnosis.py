"""A sampler's chains looked at as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbayes.checks.convergence import Array, by_chain, ess, rhat
from torchbayes.likelihood import Categorical, Likelihood
from torchbayes.posterior import Point, Samples
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive, RegressionPredictive
from torchbayes.prior import Prior

__all__ = ["Diagnosis", "Quantity", "diagnose", "log_posterior", "predictions"]


@dataclass(frozen=True)
class Quantity:
    """R-hat and effective sample size of one or many numbers that chains were followed by.

    Attributes:
        rhat: One for each number, or None with a single chain.
        ess: One for each number.
    """

    rhat: Array | None
    ess: Array

    @classmethod
    def of(cls, values: Array) -> Quantity:
        """Of (chains, draws, …)."""
        return cls(rhat(values) if len(values) > 1 else None, ess(values))


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        chains: The number of chains.
        draws: The draws of each.
        predictions: Of the predicted probabilities (or means) of the inputs.
        log_posterior: Of the log-posterior density, if there was data to compute it from.
    """

    chains: int
    draws: int
    predictions: Quantity
    log_posterior: Quantity | None


def predictions(
    model: nn.Module, samples: Samples, inputs: Any, likelihood: Likelihood | None = None
) -> Array:
    """What every draw predicts: (chains, draws, examples, classes or targets).

    Args:
        model: The network.
        samples: Its states.
        inputs: As for `torchbayes.predictive`.
        likelihood: What the outputs mean; class logits if not given.
    """
    rows: list[Tensor] = []
    for weights in samples:
        one = predictive(model, Point(weights), inputs, 1, likelihood)
        assert isinstance(one, (ClassPredictive, RegressionPredictive))
        rows.append((one.probs if isinstance(one, ClassPredictive) else one.mean).double().cpu())
    return by_chain(torch.stack(rows).flatten(2).numpy(), samples.chains)


@torch.no_grad()
def log_posterior(
    model: nn.Module,
    samples: Samples,
    inputs: Tensor,
    targets: Tensor,
    *,
    prior: Prior,
    likelihood: Likelihood | None = None,
    train_size: int,
    temperature: float = 1.0,
) -> Array:
    """The log-posterior of every draw, up to a constant: (chains, draws).

    Args:
        model: The network.
        samples: Its states.
        inputs: Training inputs, all or some: the same for all draws, so that they can be compared.
        targets: Their targets.
        prior: The prior that was sampled under.
        likelihood: What the outputs mean; class logits if not given.
        train_size: The number of training examples, to which the mean over the given ones is scaled.
        temperature: The temperature that was sampled at.
    """
    noise = Categorical() if likelihood is None else likelihood
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    values: list[float] = []
    try:
        for weights in samples:
            losses = [
                float(noise.loss(torch.func.functional_call(model, weights, (x,)), y)) * len(y)
                for x, y in zip(inputs.split(512), targets.split(512), strict=True)
            ]
            likely = -sum(losses) / len(targets) * train_size / temperature
            own = {name: tensor for name, tensor in weights.items() if name in trainable}
            values.append(likely + float(prior.log_prob(own)))
    finally:
        for module, mode in modes:
            module.training = mode
    return by_chain(np.asarray(values), samples.chains)


def diagnose(
    model: nn.Module,
    samples: Samples,
    inputs: Any,
    *,
    likelihood: Likelihood | None = None,
    log_posteriors: Array | None = None,
) -> Diagnosis:
    """R-hat and effective sample size of a sampler's predictions and of its log-posterior.

    Args:
        model: The network.
        samples: Its states, of one or several chains.
        inputs: What to predict: a few hundred inputs are enough.
        likelihood: What the outputs mean; class logits if not given.
        log_posteriors: From `log_posterior`, if it is of interest.

    Raises:
        ImportError: If ArviZ is not installed.
        ValueError: If a chain has fewer than 4 draws.
    """
    predicted = predictions(model, samples, inputs, likelihood)
    return Diagnosis(
        chains=predicted.shape[0],
        draws=predicted.shape[1],
        predictions=Quantity.of(predicted),
        log_posterior=None if log_posteriors is None else Quantity.of(log_posteriors),
    )
