"""The KL term of the variational objective, for a Gaussian posterior against some prior.

KL(q ‖ p) = E_q[log q(w) − log p(w)], summed over weights. For a Gaussian prior N(m, 1/δ) it is known:

    KL = Σ ½ (δ σ² + δ (μ−m)² − 1 − log δ) − log σ
    ∂KL/∂μ = δ (μ−m)      ∂KL/∂σ = δ σ − 1/σ

For any other prior it is estimated by the draw that the likelihood is computed with, as in Bayes by
Backprop. With w = μ + σε the first half is log q(w) = −Σ (½ε² + log σ + ½ log 2π), which gives −1/σ to σ;
the second half gives −∂log p/∂w to the drawn weight.

A term is asked for its value and, in the backward pass of the draw, for its gradients, so that they cost
no passes over memory of their own.
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

__all__ = ["GaussianKL", "KLTerm", "MixtureKL", "Part", "kl_term"]

_Number = TypeVar("_Number", float, Tensor)


@dataclass
class Part:
    """The posterior and the draw of one slab of weights, as flat tensors.

    Attributes:
        mean: μ.
        std: σ = softplus(ρ).
        slope: dσ/dρ, the logistic function of ρ.
        noise: ε; None if there is no draw, or if its deviation is kept instead.
        sample: w = μ + σε; None if there is no draw or if the KL term has no use for it.
        pull: The prior's −∂log p/∂w, if it is known already.
        deviation: σε; only where an estimator needs it, and then instead of ε.
        sums: Σσ², Σμ², Σ log σ and Σε², if they are known already.
    """

    mean: Tensor
    std: Tensor
    slope: Tensor
    noise: Tensor | None = None
    sample: Tensor | None = None
    deviation: Tensor | None = None
    pull: Tensor | None = None
    sums: list[float] | None = None

    def times_noise(self, factor: Tensor, out: Tensor) -> Tensor:
        """`factor` · ε."""
        if self.noise is not None:
            return torch.mul(factor, self.noise, out=out)
        assert self.deviation is not None
        return torch.mul(factor, self.deviation, out=out).div_(self.std)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields, in order."""
        return self.mean, self.std, self.slope, self.noise, self.sample, self.deviation, self.pull


def _sum(flat: Tensor) -> Tensor:
    wide = torch.float32 if flat.dtype.itemsize < 4 else flat.dtype
    return flat.sum(dtype=wide).double()


def _sum_of_squares(flat: Tensor) -> Tensor:
    wide = flat.float() if flat.dtype.itemsize < 4 else flat
    rows = 256  # on all threads, and without rounding errors that grow with the number of weights
    whole = len(wide) // rows * rows
    norms = torch.linalg.vector_norm(wide[:whole].view(rows, -1), dim=1)
    rest: Tensor = wide[whole:].double().square().sum()
    return torch.add(rest, norms.double().square().sum())


def _log_sum(space: Workspace, std: Tensor) -> Tensor:
    """Σ log σ: of large tensors by the logarithms of products of four, which are a quarter of the work."""
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


def _subtract_reciprocal(out: Tensor, std: Tensor, scale: float) -> None:
    out.addcdiv_(torch.ones((), dtype=std.dtype, device=std.device), std, value=-scale)


def _closed_form(count: int, squares: _Number, logs: _Number, precision: float) -> _Number:
    """The KL term of `count` weights from Σ(σ² + (μ−m)²) and Σ log σ."""
    return 0.5 * (precision * squares - count * (1 + math.log(precision))) - logs


def _double(value: float, slab: Slab) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=slab.device)


class KLTerm:
    """A KL term; this one serves any prior.

    It is the first half, log q(w), by the draw in hand; the second, log p(w), is left to torch's own
    differentiation of the prior.

    Attributes:
        closed: Whether the term is exact and needs no draw.
        complete: Whether the value has both halves; if not, −log p(w) is to be added to it.
        needs_sample: Whether the drawn weights have to be kept for the term's gradient.
    """

    closed = False
    complete = False
    needs_sample = False

    def value(self, space: Workspace, slab: Slab, names: list[str], part: Part) -> Tensor:
        """The slab's share of the term, a number in double precision."""
        normaliser = 0.5 * math.log(2 * math.pi) * slab.count
        if part.sums is not None:
            _, _, logs, squares = part.sums
            return _double(-0.5 * squares - logs - normaliser, slab)
        one = torch.ones((), dtype=slab.dtype, device=slab.device)
        noise = part.noise
        if noise is None:
            noise = part.times_noise(one, slab.take(space))
        return -0.5 * _sum_of_squares(noise) - _log_sum(space, part.std) - normaliser

    def moments(self) -> tuple[float, float] | None:
        """The m and δ of `to_mean`, δ(μ−m), and of `to_std`, δσ − 1/σ; None if they are not two numbers."""
        return 0.0, 0.0

    def to_sample(
        self, space: Workspace, part: Part, scale: float, grad: Tensor | None
    ) -> Tensor | None:
        """`grad`, the gradient of the drawn weights, with the term's own added, times `scale`."""
        return grad

    def to_mean(
        self,
        space: Workspace,
        slab: Slab,
        names: list[str],
        part: Part,
        scale: float,
        grad: Tensor | None,
    ) -> Tensor | None:
        """`grad`, the gradient of μ, with the term's own added that does not come by way of the draw."""
        return grad

    def to_std(
        self, space: Workspace, slab: Slab, names: list[str], part: Part, scale: float, grad: Tensor
    ) -> None:
        """Add the term's gradient of σ that does not come by way of the draw to `grad`, in place."""
        _subtract_reciprocal(grad, part.std, scale)


class GaussianKL(KLTerm):
    """The closed form.

    Args:
        prior: The prior.
    """

    closed = True
    complete = True

    def __init__(self, prior: GaussianPrior) -> None:
        self._prior = prior

    def _moments(
        self, space: Workspace, slab: Slab, names: list[str]
    ) -> tuple[Tensor, Tensor] | None:
        """The prior's m and δ for each weight, or None where they are two numbers."""
        mean, precision = self._prior.mean, self._prior.precision
        if not isinstance(mean, dict) and not isinstance(precision, dict):
            return None
        means, precisions = [], []
        for name, weight in zip(names, slab.members, strict=True):
            m, delta = self._prior.moments(name, weight.detach())
            means.append(m.expand_as(weight))
            precisions.append(delta.expand_as(weight))
        return slab.flat(space, means), slab.flat(space, precisions)

    def moments(self) -> tuple[float, float] | None:
        """The prior's m and δ."""
        mean, precision = self._prior.mean, self._prior.precision
        if isinstance(mean, dict) or isinstance(precision, dict):
            return None
        return float(mean), float(precision)

    def value(self, space: Workspace, slab: Slab, names: list[str], part: Part) -> Tensor:
        """The closed form, summed over the slab."""
        known = self.moments()
        if part.sums is not None and known is not None and known[0] == 0:
            stds, means, logs, _ = part.sums
            return _double(_closed_form(slab.count, stds + means, logs, known[1]), slab)
        moments = self._moments(space, slab, names)
        if moments is not None:
            m, delta = (moment.double() for moment in moments)
            mean, std = part.mean.double(), part.std.double()
            terms = 0.5 * (delta * (std**2 + (mean - m) ** 2) - 1 - delta.log()) - std.log()
            # A precision of 0 is no prior: such a weight adds nothing.
            return torch.where(delta > 0, terms, 0.0).sum()
        number, precision = float(self._prior.mean), float(self._prior.precision)  # type: ignore[arg-type]
        distance = part.mean if number == 0 else part.mean - number
        quadratic = _sum_of_squares(part.std) + _sum_of_squares(distance)
        return _closed_form(slab.count, quadratic, _log_sum(space, part.std), precision)

    def to_mean(
        self,
        space: Workspace,
        slab: Slab,
        names: list[str],
        part: Part,
        scale: float,
        grad: Tensor | None,
    ) -> Tensor | None:
        """Add δ (μ−m)."""
        start = torch.zeros((), dtype=slab.dtype, device=slab.device) if grad is None else grad
        out = slab.take(space)
        moments = self._moments(space, slab, names)
        if moments is not None:
            torch.sub(part.mean, moments[0], out=out)
            return torch.addcmul(start, out, moments[1], value=scale, out=out)
        number, precision = float(self._prior.mean), float(self._prior.precision)  # type: ignore[arg-type]
        torch.add(start, part.mean, alpha=scale * precision, out=out)
        return out if number == 0 else out.sub_(scale * precision * number)

    def to_std(
        self, space: Workspace, slab: Slab, names: list[str], part: Part, scale: float, grad: Tensor
    ) -> None:
        """Add δσ − 1/σ."""
        moments = self._moments(space, slab, names)
        if moments is None:
            grad.add_(part.std, alpha=scale * float(self._prior.precision))  # type: ignore[arg-type]
            _subtract_reciprocal(grad, part.std, scale)
            return
        delta = moments[1]
        grad.addcmul_(part.std, delta, value=scale)
        grad.addcdiv_((delta > 0).to(grad.dtype), part.std, value=-scale)


def mixture(pull: Tensor, w: Tensor, *, wide: float, excess: float, odds: float) -> list[Tensor]:
    """Write the scale mixture prior's −∂log p/∂w to `pull`, as `MixtureKL` has it.

    Args:
        pull: To be overwritten.
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
    """For the scale mixture prior, with its log-density and gradient written out.

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

    def value(self, space: Workspace, slab: Slab, names: list[str], part: Part) -> Tensor:
        """The estimate of log q(w) − log p(w) by the draw in hand."""
        assert part.sample is not None
        first_half = super().value(space, slab, names, part)
        part.pull, sums = self._pull(space, part.sample)
        second_half: Tensor = slab.count * self._peak - 0.5 * self._wide * sums[0] + sums[1]
        return first_half - second_half

    def _pull(self, space: Workspace, sample: Tensor) -> tuple[Tensor, list[Any]]:
        pull = space.like(sample)
        sums = space.apply(
            mixture, [[pull]], [[sample]], wide=self._wide, excess=self._excess, odds=self._odds
        )
        assert sums is not None
        return pull, sums

    def to_sample(
        self, space: Workspace, part: Part, scale: float, grad: Tensor | None
    ) -> Tensor | None:
        """Add −∂log p/∂w."""
        assert part.sample is not None
        pull = self._pull(space, part.sample)[0] if part.pull is None else part.pull
        out = space.like(pull)  # the pull itself may be asked for again
        if grad is None:
            return torch.mul(pull, scale, out=out)
        return torch.add(grad, pull, alpha=scale, out=out)


def kl_term(prior: Prior) -> KLTerm:
    """The fastest term that is right for a prior."""
    # Exact types: a subclass may have changed the density.
    if type(prior) is GaussianPrior:
        return GaussianKL(prior)
    if type(prior) is ScaleMixturePrior:
        return MixtureKL(prior)
    return KLTerm()
