"""The KL term of the variational objective, for a Gaussian posterior and some prior.

KL(q ‖ p) = E_q[log q(w) − log p(w)], summed over weights. For a Gaussian prior N(m, 1/δ) it is known:

    KL = Σ ½ (δ σ² + δ (μ−m)² − 1 − log δ) − log σ
    ∂KL/∂μ = δ (μ−m)      ∂KL/∂σ = δ σ − 1/σ

For any other prior it is estimated from the draw that the likelihood is computed with, as in Bayes by
Backprop. With w = μ + σε the first half is log q(w) = −Σ (½ε² + log σ + ½ log 2π), whose gradient of σ is
−1/σ; that of the second half is −∂log p/∂w, of the drawn weight.

A term computes its value and, in the backward pass of the draw, its gradients, so that they need no passes
over memory of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torchbayes.core.workspace import LARGE, Workspace
from torchbayes.prior import GaussianPrior, Prior, ScaleMixturePrior
from torchbayes.variational.flat_weights import Slab

__all__ = ["GaussianKL", "KLTerm", "MixtureKL", "Part", "add_divided", "kl_term", "plus"]

_Number = TypeVar("_Number", float, Tensor)


@dataclass
class Part:
    """The posterior and the draw of one slab of weights, as flat tensors.

    Attributes:
        slab: The weights.
        mean: μ.
        std: σ = softplus(ρ).
        slope: dσ/dρ, the logistic function of ρ.
        noise: ε; None if there is no draw, or if its deviation is kept instead.
        sample: w = μ + σε; None if there is no draw or if the KL term does not need it.
        deviation: σε, instead of ε, where an estimator needs it.
        pull: The prior's −∂log p/∂w, once computed.
        sums: Σσ², Σμ², Σ log σ and Σε², if already computed.
    """

    slab: Slab
    mean: Tensor
    std: Tensor
    slope: Tensor
    noise: Tensor | None = None
    sample: Tensor | None = None
    deviation: Tensor | None = None
    pull: Tensor | None = None
    sums: list[float] | None = None

    def times_noise(self, factor: Tensor, out: Tensor) -> Tensor:
        """Write `factor` · ε to `out`."""
        if self.noise is not None:
            return torch.mul(factor, self.noise, out=out)
        assert self.deviation is not None
        return torch.mul(factor, self.deviation, out=out).div_(self.std)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors, in the order of the fields."""
        return self.mean, self.std, self.slope, self.noise, self.sample, self.deviation, self.pull

    def number(self, value: float) -> Tensor:
        """Return a number in double precision on the slab's device."""
        return torch.tensor(value, dtype=torch.float64, device=self.slab.device)


def plus(
    x: Tensor, y: Tensor, factor: float | Tensor, times: Tensor | None = None, *, out: Tensor
) -> Tensor:
    """Write x + y · factor (· times) to `out`; the factor is a tensor where reading it would be to wait."""
    if isinstance(factor, Tensor):
        return torch.addcmul(x, y if times is None else y * times, factor, out=out)
    if times is None:
        return torch.add(x, y, alpha=factor, out=out)
    return torch.addcmul(x, y, times, value=factor, out=out)


def add_divided(
    x: Tensor, factor: float | Tensor, y: Tensor, times: Tensor | None = None
) -> Tensor:
    """Add factor (· times) / y to x in place."""
    above = y.new_ones(()) if times is None else times
    if isinstance(factor, Tensor):
        return x.addcdiv_(above * factor.to(y.dtype), y)
    return x.addcdiv_(above, y, value=factor)


def _sum(flat: Tensor) -> Tensor:
    wide = torch.float32 if flat.dtype.itemsize < 4 else flat.dtype
    return flat.sum(dtype=wide).double()


def _sum_of_squares(flat: Tensor) -> Tensor:
    wide = flat.float() if flat.dtype.itemsize < 4 else flat
    rows = 256  # uses all threads, and avoids rounding errors that grow with the number of weights
    whole = len(wide) // rows * rows
    norms = torch.linalg.vector_norm(wide[:whole].view(rows, -1), dim=1)
    rest: Tensor = wide[whole:].double().square().sum()
    return torch.add(rest, norms.double().square().sum())


def _log_sum(space: Workspace, std: Tensor) -> Tensor:
    """Return Σ log σ; for large tensors from logarithms of products of four, a quarter of the work."""
    rows = std.numel() // 4
    if std.numel() < LARGE or std.device.type != "cpu" or not _multiplies(std):
        return _sum(torch.log(std, out=space.like(std)))
    first, second, third, fourth = std[: 4 * rows].view(4, rows)
    product = torch.mul(first, second, out=space.like(std)[:rows]).mul_(third).mul_(fourth)
    return _sum(product.log_()) + _sum(std[4 * rows :].log())


def _multiplies(std: Tensor) -> bool:
    """Whether four entries can be multiplied without leaving the type's range."""
    limits = torch.finfo(std.dtype)
    low, high = std.aminmax()
    return bool(low > limits.tiny**0.24) and bool(high < limits.max**0.24)


def _closed_form(count: int, squares: _Number, logs: _Number, precision: float) -> _Number:
    """Return the KL term of `count` weights from Σ(σ² + (μ−m)²) and Σ log σ."""
    return 0.5 * (precision * squares - count * (1 + math.log(precision))) - logs


class KLTerm:
    """A KL term; this one serves any prior.

    It is the first half, log q(w), estimated from the draw; the second, log p(w), is left to torch's own
    differentiation of the prior.

    Attributes:
        closed: Whether the term is exact and needs no draw.
        complete: Whether the value has both halves; if not, −log p(w) must be added to it.
        needs_sample: Whether the drawn weights must be kept for the term's gradient.
    """

    closed = False
    complete = False
    needs_sample = False

    def value(self, space: Workspace, part: Part) -> Tensor:
        """Return the slab's share of the term, a number in double precision."""
        normaliser = 0.5 * math.log(2 * math.pi) * part.slab.count
        if part.sums is not None:
            _, _, logs, squares = part.sums
            return part.number(-0.5 * squares - logs - normaliser)
        noise = part.noise
        if noise is None:
            noise = part.times_noise(part.mean.new_ones(()), part.slab.take(space))
        return -0.5 * _sum_of_squares(noise) - _log_sum(space, part.std) - normaliser

    def moments(self) -> tuple[float, float] | None:
        """Return m and δ of `to_mean`, δ(μ−m), and `to_std`, δσ − 1/σ; None if they are not two numbers."""
        return 0.0, 0.0

    def to_sample(
        self, space: Workspace, part: Part, scale: float | Tensor, grad: Tensor | None
    ) -> Tensor | None:
        """Add the term's gradient of the drawn weights, times `scale`, to `grad`."""
        return grad

    def to_mean(
        self, space: Workspace, part: Part, scale: float | Tensor, grad: Tensor | None
    ) -> Tensor | None:
        """Add the term's gradient of μ, except for what passes through the draw, to `grad`."""
        return grad

    def to_std(self, space: Workspace, part: Part, scale: float | Tensor, grad: Tensor) -> None:
        """Add the term's gradient of σ, except for what passes through the draw, to `grad` in place."""
        add_divided(grad, -scale, part.std)


class GaussianKL(KLTerm):
    """The closed form for a Gaussian prior.

    Args:
        prior: The prior.
    """

    closed = True
    complete = True

    def __init__(self, prior: GaussianPrior) -> None:
        self._prior = prior

    def moments(self) -> tuple[float, float] | None:
        """Return the prior's m and δ if they are the same for all weights."""
        return self._prior.shared

    def _moments_by_weight(self, space: Workspace, slab: Slab) -> list[Tensor]:
        """Return m and δ for each entry of the slab."""
        pairs = [
            self._prior.moments(name, weight.detach())
            for name, weight in zip(slab.names, slab.members, strict=True)
        ]
        return [
            slab.flat(space, [m.expand_as(w) for m, w in zip(column, slab.members, strict=True)])
            for column in zip(*pairs, strict=True)
        ]

    def value(self, space: Workspace, part: Part) -> Tensor:
        """Return the closed form, summed over the slab."""
        moments, count = self.moments(), part.slab.count
        if moments is None:
            m, delta = (moment.double() for moment in self._moments_by_weight(space, part.slab))
            mean, std = part.mean.double(), part.std.double()
            terms = 0.5 * (delta * (std**2 + (mean - m) ** 2) - 1 - delta.log()) - std.log()
            # A precision of 0 means no prior: such a weight adds nothing.
            return torch.where(delta > 0, terms, 0.0).sum()
        centre, precision = moments
        if part.sums is not None and centre == 0:
            stds, means, logs, _ = part.sums
            return part.number(_closed_form(count, stds + means, logs, precision))
        distance = part.mean if centre == 0 else part.mean - centre
        quadratic = _sum_of_squares(part.std) + _sum_of_squares(distance)
        return _closed_form(count, quadratic, _log_sum(space, part.std), precision)

    def to_mean(
        self, space: Workspace, part: Part, scale: float | Tensor, grad: Tensor | None
    ) -> Tensor | None:
        """Add δ (μ−m)."""
        start = part.mean.new_zeros(()) if grad is None else grad
        moments, out = self.moments(), part.slab.take(space)
        if moments is None:
            m, delta = self._moments_by_weight(space, part.slab)
            torch.sub(part.mean, m, out=out)
            return plus(start, out, scale, delta, out=out)
        centre, precision = moments
        plus(start, part.mean, scale * precision, out=out)
        return out if centre == 0 else out.sub_(scale * precision * centre)

    def to_std(self, space: Workspace, part: Part, scale: float | Tensor, grad: Tensor) -> None:
        """Add δσ − 1/σ."""
        moments = self.moments()
        if moments is None:
            _, delta = self._moments_by_weight(space, part.slab)
            plus(grad, part.std, scale, delta, out=grad)
            add_divided(grad, -scale, part.std, (delta > 0).to(grad.dtype))
        else:
            plus(grad, part.std, scale * moments[1], out=grad)
            super().to_std(space, part, scale, grad)


def mixture(pull: Tensor, w: Tensor, *, wide: float, excess: float, odds: float) -> list[Tensor]:
    """Write the scale mixture prior's −∂log p/∂w to `pull`, by the formula of `MixtureKL`.

    Args:
        pull: Overwritten.
        w: The drawn weights.
        wide: 1/σ₁².
        excess: 1/σ₂² − 1/σ₁².
        odds: u at w = 0.

    Returns:
        Σw² and Σ softplus(u).
    """
    u = torch.addcmul(w.new_full((), odds), w, w, value=-0.5 * excess)
    torch.sigmoid(u, out=pull).mul_(excess).add_(wide).mul_(w)
    return [_sum_of_squares(w), _sum(F.softplus(u))]


class MixtureKL(KLTerm):
    """The estimate for the scale mixture prior, with its log-density and gradient written out.

    With u = log((1−π)/π) + log(σ₁/σ₂) − ½ w² (1/σ₂² − 1/σ₁²), the log-odds of the narrow component,

        log p(w) = log π − log σ₁ − ½ log 2π − ½ w²/σ₁² + softplus(u)
        −∂log p/∂w = w (1/σ₁² + (1/σ₂² − 1/σ₁²) · logistic(u))

    Args:
        prior: The prior.
    """

    complete = True
    needs_sample = True

    def __init__(self, prior: ScaleMixturePrior) -> None:
        self._wide = prior.std1**-2
        self._excess = prior.std2**-2 - prior.std1**-2
        self._odds = math.log((1 - prior.pi) / prior.pi) + math.log(prior.std1 / prior.std2)
        self._peak = math.log(prior.pi) - math.log(prior.std1) - 0.5 * math.log(2 * math.pi)

    def value(self, space: Workspace, part: Part) -> Tensor:
        """Estimate log q(w) − log p(w) from the draw."""
        assert part.sample is not None
        first_half = super().value(space, part)
        part.pull, sums = self._pull(space, part.sample)
        second_half: Tensor = part.slab.count * self._peak - 0.5 * self._wide * sums[0] + sums[1]
        return first_half - second_half

    def _pull(self, space: Workspace, sample: Tensor) -> tuple[Tensor, list[Any]]:
        pull = space.like(sample)
        sums = space.apply(
            mixture, [[pull]], [[sample]], wide=self._wide, excess=self._excess, odds=self._odds
        )
        assert sums is not None
        return pull, sums

    def to_sample(
        self, space: Workspace, part: Part, scale: float | Tensor, grad: Tensor | None
    ) -> Tensor | None:
        """Add −∂log p/∂w."""
        assert part.sample is not None
        pull = self._pull(space, part.sample)[0] if part.pull is None else part.pull
        out = space.like(pull)  # the pull itself may be needed again
        if grad is None:
            return torch.mul(pull, scale, out=out)
        return plus(grad, pull, scale, out=out)


def kl_term(prior: Prior) -> KLTerm:
    """Return the fastest term that is correct for a prior."""
    # Exact types: a subclass may have changed the density.
    if type(prior) is GaussianPrior:
        return GaussianKL(prior)
    if type(prior) is ScaleMixturePrior:
        return MixtureKL(prior)
    return KLTerm()
