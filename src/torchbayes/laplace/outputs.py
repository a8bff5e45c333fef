"""What a likelihood says about the curvature in a network's outputs.

The generalised Gauss–Newton matrix of a training set is Σₙ Jₙᵀ Hₙ Jₙ with Hₙ the Hessian of example n's
negative log-likelihood in the outputs. Column c of a root, Hₙ = Σ_c sₙc sₙcᵀ, gives one backward pass: Jₙᵀ
sₙc.

| curvature | columns |
| --- | --- |
| `"ggn"` | an exact root: of diag(p) − ppᵀ for classes, p(1 − p) for binary labels, 1/σ² for Gaussian noise |
| `"sampled"` | ∇ −log p(y, given f) for labels y drawn from the model, whose second moment is Hₙ |
| `"empirical"` | ∇ −log p(y, given f) for the label in the data (empirical Fisher: no approximation of Hₙ) |

The root for classes is that of the eigenvectors, in falling order: in a trained network most classes of most
examples have next to no probability, and columns in which a batch has less than 10⁻⁷ of its trace are left
out.

A weight of a class, or of positive labels, multiplies Hₙ, and an ignored label makes it 0: columns get the
root of it. Where the noise is predicted, Hₙ is 2 for a log σ.

Gaussian noise of one size σ is kept apart: columns are those of σ = 1 and `Observed.scale` is 1/σ², so that
the evidence is a function of σ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torchbayes.likelihood import Bernoulli, Categorical, GaussianNoise, Likelihood, Observation
from torchbayes.predict.results import like_predictions

__all__ = ["EXACT_UP_TO", "Observed", "columns", "has_root", "noise_of"]

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
    return isinstance(likelihood, (GaussianNoise, Bernoulli))


def columns(
    kind: str, likelihood: Likelihood, outputs: Tensor, targets: Tensor,
    generator: torch.Generator, samples: int = 1,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield columns of roots of the examples' Hessians, each of the shape of the outputs.

    Args:
        kind: `"ggn"`, `"sampled"` or `"empirical"`.
        likelihood: The likelihood.
        outputs: Outputs of the network, without a graph.
        targets: Targets of the examples, for `"empirical"`.
        generator: Source of the labels of `"sampled"`.
        samples: Number of labels of `"sampled"`.
    """
    if kind == "empirical":
        yield _gradient(likelihood, outputs, targets)
        return
    made: Iterator[Tensor]
    weight = _root_weights(likelihood, outputs, targets)
    if kind == "sampled":
        if isinstance(likelihood, (Categorical, Bernoulli)):
            likelihood = type(likelihood)()  # the weights are those of the labels in the data
        made = (
            _gradient(likelihood, outputs, _draw(likelihood, outputs, generator))
            / math.sqrt(samples)
            for _ in range(samples)
        )
    elif isinstance(likelihood, Categorical):
        made = _class_columns(outputs)
    else:
        made = _diagonal_columns(_roots(likelihood, outputs))
    for column in made:
        yield column if weight is None else column * weight


def _root_weights(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the roots of the weights of the examples' labels, which broadcast; None if all are 1."""
    if isinstance(likelihood, Categorical):
        ignored, factors = likelihood.ignore_index, likelihood.class_weight
        if ignored is None and factors is None:
            return None
        known = (
            torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
        )
        weights = known.to(outputs)
        if factors is not None:
            weights = weights * factors.to(outputs)[targets.where(known, 0)]
        return weights.sqrt().unsqueeze(1)
    if isinstance(likelihood, Bernoulli) and likelihood.positive_weight is not None:
        labels = like_predictions(targets, outputs.shape).to(outputs)
        factor = likelihood.positive_weight.to(outputs)
        if factor.numel() > 1:
            factor = factor.reshape(-1, *[1] * (outputs.dim() - 2))
        return (1 + (factor - 1) * labels).sqrt()
    return None


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
    """Return the roots of a diagonal Hessian."""
    if isinstance(likelihood, Bernoulli):
        return (outputs.sigmoid() * (-outputs).sigmoid()).sqrt()
    assert isinstance(likelihood, GaussianNoise)
    if not likelihood.predicted:
        return torch.ones_like(outputs)
    _, log_std = outputs.chunk(2, dim=-1)
    return torch.cat([(-log_std).exp(), torch.full_like(log_std, math.sqrt(2))], -1)


def _diagonal_columns(roots: Tensor) -> Iterator[Tensor]:
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
    with torch.random.fork_rng():
        # torch's distributions draw from the global generator only.
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        return likelihood.distribution(outputs).sample()


def _gradient(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of every example's negative log-likelihood, for noise of one size times σ."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        loss = likelihood.loss(leaf, targets) * likelihood.count(targets)
    (gradient,) = torch.autograd.grad(loss, leaf)
    noise = noise_of(likelihood)
    return gradient if noise is None else gradient * noise.std.detach().to(gradient)


class Observed:
    """The log-likelihood of the training set, as a function of the noise where that has one size.

    Args:
        likelihood: The likelihood.

    Attributes:
        examples: Number of examples.
        count: Number of targets.
        total: Σ (y − f)² for noise of one size, otherwise the negative log-likelihood.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.examples = self.count = 0
        self.total = 0.0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        size = len(outputs)
        noise = noise_of(self.likelihood)
        if noise is None:
            self.total += float(self.likelihood.loss(outputs, targets)) * self.likelihood.count(
                targets
            )
        else:
            aims = like_predictions(targets, outputs.shape).double()
            self.total += float((aims - outputs.double()).square().sum())
        self.examples += size
        self.count += outputs.numel()

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
