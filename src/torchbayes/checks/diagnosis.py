"""Diagnosis of a sampler's chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbayes.checks.convergence import Array, by_chain, ess, rhat
from torchbayes.core.batch import device_of
from torchbayes.core.names import named_parameters
from torchbayes.core.outputs import output_tensor
from torchbayes.core.private import private_copy
from torchbayes.likelihood import Categorical, Likelihood
from torchbayes.posterior import Point, Samples
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive, RegressionPredictive
from torchbayes.prior import Prior

__all__ = ["Diagnosis", "Quantity", "diagnose", "log_posterior", "predictions"]


@dataclass(frozen=True)
class Quantity:
    """R-hat and effective sample size of one or more quantities.

    Attributes:
        rhat: R-hat of each quantity, or None for a single chain.
        ess: Effective sample size of each quantity.
    """

    rhat: Array | None
    ess: Array

    @classmethod
    def of(cls, values: Array) -> Quantity:
        """Compute both from values (chains, draws, …)."""
        return cls(rhat(values) if len(values) > 1 else None, ess(values))


@dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose`.

    Attributes:
        chains: Number of chains.
        draws: Draws per chain.
        predictions: Convergence of the predicted probabilities (or means).
        log_posterior: Convergence of the log-posterior density, if it was given.
    """

    chains: int
    draws: int
    predictions: Quantity
    log_posterior: Quantity | None


def predictions(
    model: nn.Module, samples: Samples, inputs: Any, likelihood: Likelihood | None = None
) -> Array:
    """Compute the predictions of every draw: (chains, draws, examples, classes or targets).

    Args:
        model: Network.
        samples: Draws of its weights.
        inputs: Inputs for `torchbayes.predictive`.
        likelihood: Likelihood of the outputs; categorical by default.
    """
    rows: list[Tensor] = []
    for weights in samples:
        one = predictive(model, Point(weights), inputs, 1, likelihood)
        assert isinstance(one, (ClassPredictive, BinaryPredictive, RegressionPredictive))
        rows.append(
            (one.mean if isinstance(one, RegressionPredictive) else one.probs).double().cpu()
        )
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
    """Compute the log-posterior of every draw, up to a constant: (chains, draws).

    Args:
        model: Network.
        samples: Draws of its weights.
        inputs: Training inputs, all or some; the same for all draws, so that they can be compared.
        targets: Their targets.
        prior: Prior of the chains.
        likelihood: Likelihood of the outputs; categorical by default.
        train_size: Number of training examples, to which the mean over the given ones is scaled.
        temperature: Temperature of the chains.
    """
    noise = Categorical() if likelihood is None else likelihood
    trainable = {name for name, p in named_parameters(model).items() if p.requires_grad}
    twin = private_copy(model)
    device = device_of(model)
    inputs, targets = inputs.to(device), targets.to(device)
    values: list[float] = []
    for drawn in samples:
        weights = {name: tensor.to(device) for name, tensor in drawn.items()}
        losses = []
        for x, y in zip(inputs.split(512), targets.split(512), strict=True):
            outputs = output_tensor(samples.call(twin, weights, x))
            losses.append(float(noise.loss(outputs, y)) * len(y))
        likely = -sum(losses) / len(targets) * train_size / temperature
        own = {name: tensor for name, tensor in weights.items() if name in trainable}
        values.append(likely + float(prior.log_prob(own)))
    return by_chain(np.asarray(values), samples.chains)


def diagnose(
    model: nn.Module,
    samples: Samples,
    inputs: Any,
    *,
    likelihood: Likelihood | None = None,
    log_posteriors: Array | None = None,
) -> Diagnosis:
    """Compute R-hat and effective sample size of a sampler's predictions and of its log-posterior.

    Args:
        model: Network.
        samples: Draws of its weights, from one or more chains.
        inputs: Inputs to predict; a few hundred are enough.
        likelihood: Likelihood of the outputs; categorical by default.
        log_posteriors: Result of `log_posterior`, if it is to be diagnosed too.

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
