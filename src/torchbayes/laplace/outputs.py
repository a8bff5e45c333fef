"""What a likelihood says about the curvature in a network's outputs.

The generalised Gauss–Newton matrix of a training set is Σₙ Jₙᵀ Hₙ Jₙ with Hₙ the Hessian of example n's
negative log-likelihood in the outputs. Column c of a root, Hₙ = Σ_c sₙc sₙcᵀ, gives one backward pass: Jₙᵀ
sₙc.

| curvature | columns |
| --- | --- |
| `"ggn"` | an exact root, of the matrices below |
| `"sampled"` | ∇ −log p(y, given f) for labels y drawn from the model, whose second moment is Hₙ |
| `"empirical"` | ∇ −log p(y, given f) for the label in the data (empirical Fisher: no approximation of Hₙ) |

H is diag(p) − ppᵀ for classes, p(1 − p) for a binary label, the rate for a count, and 1/σ² for Gaussian
noise, with 2 for a log σ that the network gives. The root for classes is that of the eigenvectors, in falling
order: in a trained network most classes of most examples have next to no probability, and columns in which a
batch has less than 10⁻⁷ of its trace are left out.

A weight of an example, a class or a positive label multiplies its negative log-likelihood and so Hₙ: columns
have its root as a factor. Labels that are ignored have the weight 0.

Gaussian noise of one size σ is kept apart: columns are those of σ = 1 and `Observed.scale` is 1/σ², so that
the evidence is a function of σ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torchbayes.core.device import forked_random_numbers
from torchbayes.likelihood import (
    Bernoulli,
    Categorical,
    GaussianNoise,
    Likelihood,
    Observation,
    Poisson,
)
from torchbayes.likelihood.base import checked_weights
from torchbayes.predict.results import like_predictions

__all__ = [
    "EXACT_UP_TO",
    "Observed",
    "best_constant",
    "columns",
    "draws_labels",
    "factors_of",
    "has_root",
    "noise_of",
]

EXACT_UP_TO = 32
"""Number of outputs up to which an exact root, one backward pass for each, is the default."""

_NEGLIGIBLE = 1e-7


def noise_of(likelihood: Likelihood) -> GaussianNoise | None:
    """Return the likelihood if it is Gaussian noise of one size, which curvature and evidence scale with."""
    one = isinstance(likelihood, GaussianNoise) and not likelihood.predicted
    return likelihood if one else None  # type: ignore[return-value]


def has_root(likelihood: Likelihood, outputs: Tensor) -> bool:
    """Whether there is an exact root for these outputs."""
    if isinstance(likelihood, Categorical):
        return outputs.dim() == 2
    return isinstance(likelihood, GaussianNoise | Bernoulli | Poisson)


def draws_labels(likelihood: Likelihood) -> bool:
    """Whether labels can be drawn from a likelihood."""
    return isinstance(likelihood, Categorical | Bernoulli | Observation)


def factors_of(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> Tensor | None:
    """Return the factors of the targets' negative log-likelihoods, like the outputs or broadcast; None for 1.

    Args:
        likelihood: The likelihood, whose class weights, ignored labels and positive weights count.
        outputs: Outputs of the network.
        targets: Targets of the examples.
        weights: Weights of the examples, if there are any.
    """
    found: Tensor | None = None
    if isinstance(likelihood, Categorical):
        known = targets if likelihood.ignore_index is None else _labels(likelihood, targets)
        if likelihood.class_weight is not None:
            found = likelihood.class_weight.to(outputs)[known.long()]
        if likelihood.ignore_index is not None:
            counted = (targets != likelihood.ignore_index).to(outputs.dtype)
            found = counted if found is None else found * counted
        found = None if found is None else found.unsqueeze(1)
    elif isinstance(likelihood, Bernoulli) and likelihood.positive_weight is not None:
        positive = like_predictions(targets, outputs.shape).to(outputs.dtype)
        factor = likelihood._factor(outputs)
        assert factor is not None
        found = 1 + (factor - 1) * positive
    if weights is not None:
        own = checked_weights(weights, len(outputs)).to(outputs)
        own = own.reshape(-1, *[1] * (outputs.dim() - 1))
        found = own if found is None else found * own
    return found


def _labels(likelihood: Likelihood, targets: Tensor) -> Tensor:
    """Return the targets with some label in place of those that are ignored."""
    if isinstance(likelihood, Categorical) and likelihood.ignore_index is not None:
        return targets.masked_fill(targets == likelihood.ignore_index, 0)
    return targets


def _unweighted(likelihood: Likelihood) -> Likelihood:
    """Return the likelihood without weights of its own: these are among `factors_of`."""
    for kind in (Categorical, Bernoulli):
        if isinstance(likelihood, kind):
            return kind()
    return likelihood


def columns(
    kind: str, likelihood: Likelihood, outputs: Tensor, targets: Tensor,
    generator: torch.Generator, samples: int = 1, factors: Tensor | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield columns of roots of the examples' Hessians, each of the shape of the outputs.

    Args:
        kind: `"ggn"`, `"sampled"` or `"empirical"`.
        likelihood: The likelihood.
        outputs: Outputs of the network, without a graph.
        targets: Targets of the examples, for `"empirical"`.
        generator: Source of the labels of `"sampled"`.
        samples: Number of labels of `"sampled"`.
        factors: Result of `factors_of`.
    """
    made = _columns(kind, likelihood, outputs, targets, generator, samples)
    root = None if factors is None else factors.sqrt()
    for column in made:
        yield column if root is None else column * root


def _columns(
    kind: str, likelihood: Likelihood, outputs: Tensor, targets: Tensor,
    generator: torch.Generator, samples: int,
) -> Iterator[Tensor]:  # fmt: skip
    if kind == "ggn":
        if isinstance(likelihood, Categorical):
            yield from _class_columns(outputs)
        else:
            yield from _separate_columns(_roots(likelihood, outputs))
        return
    plain = _unweighted(likelihood)
    if kind == "sampled":
        for _ in range(samples):
            drawn = _draw(plain, outputs, generator)
            yield _gradient(plain, outputs, drawn) / math.sqrt(samples)
    else:
        yield _gradient(plain, outputs, _labels(likelihood, targets))


def _class_columns(outputs: Tensor) -> Iterator[Tensor]:
    probs = outputs.double().softmax(1)
    hessians = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    values, vectors = torch.linalg.eigh(hessians)
    values = values.clamp_min(0)
    total = float(values.sum())
    for place in reversed(range(1, outputs.shape[1])):  # the smallest eigenvalue is 0
        yield (vectors[:, :, place] * values[:, place].sqrt().unsqueeze(1)).to(outputs.dtype)
        if float(values[:, :place].sum()) <= _NEGLIGIBLE * total:
            return


def _roots(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return the roots of the second derivatives in outputs that do not interact."""
    if isinstance(likelihood, Bernoulli):  # p(1 − p), without cancellation
        return (outputs.sigmoid() * (-outputs).sigmoid()).sqrt()
    if isinstance(likelihood, Poisson):
        return (outputs / 2).exp()
    assert isinstance(likelihood, GaussianNoise)
    if not likelihood.predicted:
        return torch.ones_like(outputs)
    _, log_std = outputs.chunk(2, dim=-1)
    return torch.cat([(-log_std).exp(), torch.full_like(log_std, math.sqrt(2))], -1)


def _separate_columns(roots: Tensor) -> Iterator[Tensor]:
    flat = roots.reshape(len(roots), -1)
    for place in range(flat.shape[1]):
        column = torch.zeros_like(flat)
        column[:, place] = flat[:, place]
        yield column.view_as(roots)


def _draw(likelihood: Likelihood, outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a target for every example from the model."""
    if isinstance(likelihood, Categorical):
        flat = outputs.movedim(1, -1).flatten(0, -2).softmax(-1)
        drawn = torch.multinomial(flat, 1, generator=generator)
        return drawn.view(outputs.shape[0], *outputs.shape[2:])
    if isinstance(likelihood, Bernoulli):
        return torch.bernoulli(outputs.sigmoid(), generator=generator)
    assert isinstance(likelihood, Observation)
    with forked_random_numbers():
        # torch's distributions draw from the global generator only.
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        torch.manual_seed(int(seed))
        return likelihood.distribution(outputs).sample()


def _gradient(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of every example's negative log-likelihood, for noise of one size times σ."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        loss = likelihood.loss(leaf, targets) * len(outputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    noise = noise_of(likelihood)
    return gradient if noise is None else gradient * noise.std.detach().to(gradient)


def best_constant(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, factors: Tensor | None
) -> Tensor | None:
    """Return the outputs, the same for every example, with the lowest loss; None without a formula for them.

    Labels are counted once more than they are there, so that those that are not there are possible.

    Args:
        likelihood: The likelihood.
        outputs: Outputs of the network, of whose shape the result is.
        targets: Targets of the examples.
        factors: Result of `factors_of`.
    """
    if isinstance(likelihood, Categorical):
        labels = _labels(likelihood, targets).long()
        own = torch.ones_like(labels, dtype=torch.float64)
        own = own if factors is None else factors.squeeze(1).double().expand_as(own)
        counts = own.mean().expand(outputs.shape[1]).clone()
        counts.index_add_(0, labels.flatten(), own.flatten())
        logits = counts.log().to(outputs)
        return logits.view(1, -1, *[1] * (outputs.dim() - 2)).expand_as(outputs)
    if not isinstance(likelihood, Bernoulli | Poisson | GaussianNoise):
        return None
    predicted = isinstance(likelihood, GaussianNoise) and likelihood.predicted
    shape = outputs.chunk(2, dim=-1)[0].shape if predicted else outputs.shape
    aims = like_predictions(targets, shape).double()
    one = aims.new_ones(())
    own = (one if factors is None else factors.double()).expand(outputs.shape)[..., : shape[-1]]
    total = own.sum(0)
    mean = (own * aims).sum(0) / total
    if isinstance(likelihood, Bernoulli):
        each = own.mean(0)
        found = ((total * mean + each) / (total + 2 * each)).logit()
    elif isinstance(likelihood, Poisson):
        found = mean.clamp_min(torch.finfo(outputs.dtype).tiny).log()
    elif predicted:
        spread = (own * (aims - mean).square()).sum(0) / total
        found = torch.cat([mean, spread.clamp_min(1e-12).log() / 2], -1)
    else:
        found = mean
    return found.to(outputs).expand_as(outputs)


class Observed:
    """The log-likelihood of the training set, as a function of the noise where that has one size.

    Args:
        likelihood: The likelihood.

    Attributes:
        examples: Number of examples.
        count: Number of targets, each times its weight.
        total: Σ (y − f)² for noise of one size, otherwise the negative log-likelihood.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.examples = 0
        self.count = self.total = 0.0

    def add(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add a batch.

        Args:
            outputs: Outputs of the network.
            targets: Targets of the examples.
            weights: Weights of the examples, if there are any.
            factors: Result of `factors_of`.
        """
        noise = noise_of(self.likelihood)
        if noise is None:
            given = () if weights is None else (weights,)
            loss = self.likelihood.loss(outputs, targets, *given)
            self.total += float(loss) * self.likelihood.count(targets)
        else:
            aims = like_predictions(targets, outputs.shape).double()
            squares = (aims - outputs.double()).square()
            self.total += float((squares if factors is None else squares * factors).sum())
        self.examples += len(outputs)
        self.count += (
            outputs.numel() if factors is None else float(factors.expand_as(outputs).sum())
        )

    def scale(self, noise: Tensor | None) -> Tensor:
        """Return the factor of the curvature, 1/σ²; 1 without noise of one size."""
        return torch.ones((), dtype=torch.float64) if noise is None else noise.double() ** -2

    def log_likelihood(self, noise: Tensor | None) -> Tensor:
        """Return log p(targets | network)."""
        if noise is None:
            return torch.tensor(-self.total, dtype=torch.float64)
        noise = noise.double()
        normaliser = noise.log() + 0.5 * math.log(2 * math.pi)
        return -self.total / (2 * noise**2) - self.count * normaliser
