"""A draw of Gaussian weights with its gradients: w = μ + σε, σ = softplus(ρ).

| symbol | here |
| --- | --- |
| w = μ + log(1 + exp ρ) · ε | `_DrawFunction.forward` |
| Δμ = ∂f/∂w + ∂f/∂μ | `_DrawFunction.backward`, `to_mean` |
| Δρ = ∂f/∂w · ε / (1 + exp(−ρ)) + ∂f/∂ρ | `_DrawFunction.backward`, `to_std` |

(C. Blundell et al., Weight Uncertainty in Neural Networks, ICML 2015, section 3.2.)

All weights are one node of the graph. Its last output is a zero, the token; adding the KL term's value
to it gives a number whose gradient arrives in the draw's own backward pass, where μ, σ and ε are at hand
and the KL term's gradients cost next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchbayes.noise import normals_
from torchbayes.prior import Prior
from torchbayes.variational.buffers import Pool
from torchbayes.variational.kl import KLTerm, Part, kl_term
from torchbayes.variational.slabs import Slab

__all__ = ["Draw", "Drawn", "Spread", "inverse_softplus", "softplus"]


class Spread(Enum):
    """What an estimator needs of a weight besides its mean and a sample."""

    NONE = 0
    DEVIATION = 1  # σε
    VARIANCE = 2  # σ²


@dataclass(frozen=True)
class Drawn:
    """A drawn weight.

    Attributes:
        name: The weight's name in the network.
        sample: w = μ + σε.
        mean: μ, where the estimator asks for a spread.
        spread: σε or σ², where the estimator asks for it.
    """

    name: str
    sample: Tensor
    mean: Tensor | None = None
    spread: Tensor | None = None


def softplus(rho: Tensor, out: Tensor, slope: Tensor, scratch: Tensor) -> None:
    """Write σ = log(1 + exp ρ) to `out` and dσ/dρ to `slope`.

    ρ is held where neither exp ρ nor σ leaves the type's range: σ is never 0 and the slope never NaN.

    Args:
        rho: ρ.
        out: For σ.
        slope: For dσ/dρ = exp ρ / (1 + exp ρ).
        scratch: To be overwritten.
    """
    limits = torch.finfo(rho.dtype)
    low, high = math.log(limits.tiny) + 0.01, 0.9 * math.log(limits.max)
    if rho.device.type == "cpu" and _between(rho, low, high):
        torch.exp(rho, out=slope)  # reading ρ twice costs less than writing it once more
    else:
        torch.clamp(rho, low, high, out=slope).exp_()
    torch.log1p(slope, out=out)
    slope.div_(torch.add(slope, 1, out=scratch))


def _between(tensor: Tensor, low: float, high: float) -> bool:
    least, most = tensor.aminmax()
    return float(least) >= low and float(most) <= high


def inverse_softplus(std: Tensor) -> Tensor:
    """The ρ whose softplus is `std`: log(exp σ − 1), without overflow."""
    return std + torch.log(-torch.expm1(-std))


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _first(tensor: Tensor) -> float:
    return float(tensor.detach()[(0,) * tensor.dim()]) if tensor.numel() else 0.0


@dataclass
class _Setting:
    """What the draw and its gradient have in common.

    It must not refer to the draw's outputs: a cycle through the graph would keep their memory in use.
    """

    pool: Pool
    names: list[str]
    slabs: list[Slab]
    term: KLTerm
    spread: Spread
    noise: bool
    generator: torch.Generator | None
    parts: list[Part] | None = None
    spent: bool = False

    def measure(self, means: Sequence[Tensor], rhos: Sequence[Tensor]) -> list[Part]:
        """Work out μ and σ of every slab, flat."""
        parts = []
        for slab in self.slabs:
            mean, rho = slab.flat(self.pool, means), slab.flat(self.pool, rhos)
            part = Part(mean, slab.take(self.pool), slab.take(self.pool))
            softplus(rho, part.std, part.slope, slab.take(self.pool))
            parts.append(part)
        return parts


class Draw:
    """One draw of a Gaussian over some weights; without noise, the Gaussian alone.

    Args:
        pool: Where large tensors come from.
        slabs: The weights' μ in slabs.
        names: The weights' names.
        means: Their μ.
        rhos: Their ρ, each laid out in memory like its μ.
        prior: What the KL term is about.
        spread: What the estimator needs.
        noise: Whether to draw.
        generator: Where ε comes from.

    Attributes:
        prior: The prior.
        drawn: The drawn weights, in the order of their names.
    """

    def __init__(
        self,
        pool: Pool,
        slabs: list[Slab],
        names: list[str],
        means: Sequence[Tensor],
        rhos: Sequence[Tensor],
        prior: Prior,
        *,
        spread: Spread = Spread.NONE,
        noise: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        self.prior, term = prior, kl_term(prior)
        self._setting = _Setting(pool, names, slabs, term, spread, noise, generator)
        self._parameters = [*means, *rhos]
        self._seen = self._look()
        outputs: tuple[Tensor, ...] = _DrawFunction.apply(  # type: ignore[no-untyped-call]
            self._setting, *self._parameters
        )
        *samples, self._token = outputs
        rows = [samples[i :: len(names)] for i in range(len(names))]
        self.drawn = [Drawn(name, *row) for name, row in zip(names, rows, strict=True) if noise]

    def _look(self) -> tuple[list[int], list[float]]:
        # torch's fused optimisers do not count up a tensor's version: look at some values, too.
        both = self._parameters
        ends = [both[0], both[-1]]
        return [tensor._version for tensor in both], [_first(tensor) for tensor in ends]

    def current(self) -> bool:
        """Whether a KL term added to this draw is one of the parameters as they are now."""
        if self._setting.spent or (torch.is_grad_enabled() and not self._token.requires_grad):
            return False
        return self._look() == self._seen

    def release(self) -> None:
        """Let go of the drawn weights, whose memory then serves their gradients, unless `kl` needs them."""
        if self._setting.term.complete:
            self.drawn = []

    def kl(self) -> Tensor:
        """The KL term, differentiable by way of this draw."""
        setting = self._setting
        assert setting.parts is not None
        with torch.no_grad(), _without_autocast(self._token.device.type):
            values = [
                setting.term.value(setting.pool, slab, setting.names, part).to(self._token.device)
                for slab, part in zip(setting.slabs, setting.parts, strict=True)
            ]
            value = torch.stack(values).sum().to(self._token.dtype)
        if setting.term.complete:
            return self._token + value
        log_prior = self.prior.log_prob({weight.name: weight.sample for weight in self.drawn})
        return self._token + value - log_prior.to(value)


def _sample(setting: _Setting, parts: list[Part]) -> tuple[list[Tensor], list[Tensor]]:
    """Draw every slab's noise; the samples and spreads of all weights, in the weights' order."""
    pool = setting.pool
    noises = [slab.take(pool) for slab in setting.slabs]
    normals_(noises, setting.generator)
    samples: dict[int, Tensor] = {}
    spreads: dict[int, Tensor] = {}
    for slab, part, noise in zip(setting.slabs, parts, noises, strict=True):
        sample, spread = slab.take(pool), None
        if setting.spread is Spread.DEVIATION:
            part.deviation = spread = noise.mul_(part.std)
            torch.add(part.mean, spread, out=sample)
        else:
            part.noise = noise
            torch.addcmul(part.mean, part.std, noise, out=sample)
        if setting.spread is Spread.VARIANCE:
            spread = torch.mul(part.std, part.std, out=slab.take(pool))
        if setting.term.needs_sample:
            part.sample = sample
        samples |= dict(zip(slab.indices, slab.weights(pool, sample), strict=True))
        if spread is not None:
            spreads |= dict(zip(slab.indices, slab.shaped(spread), strict=True))
    # Not as views: autograd treats a view as changed whenever anything in its buffer has been.
    order = range(len(setting.names))
    return [samples[i].detach() for i in order], [spreads[i].detach() for i in order if spreads]


class _DrawFunction(torch.autograd.Function):
    """From all μ and ρ to all samples, all means and spreads if asked for, and the token."""

    @staticmethod
    def forward(ctx: Any, setting: _Setting, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(setting.names)
        means, rhos = parameters[:count], parameters[count:]
        wide = torch.promote_types(means[0].dtype, torch.float32)
        token = torch.zeros((), dtype=wide, device=means[0].device)
        with _without_autocast(token.device.type):
            parts = setting.measure(means, rhos)
            samples, spreads = _sample(setting, parts) if setting.noise else ([], [])
        # Held as well as saved. Autograd lets go of what is saved when the graph has been used, `backward`
        # of what is held, so that buffers are free in time for the next draw; and the KL term and the
        # likelihood can be differentiated one after the other.
        setting.parts = ctx.parts = parts
        ctx.setting, ctx.parameters = setting, parameters
        ctx.save_for_backward(*(tensor for part in parts for tensor in part.tensors()))
        aliases = [mean.detach() for mean in means] if spreads else []
        return (*samples, *aliases, *spreads, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        setting: _Setting = ctx.setting
        count = len(setting.names)
        padded = [*grads[:-1], *[None] * (3 * count)]
        samples, means, spreads = (padded[i * count : (i + 1) * count] for i in range(3))
        drawn = any(grad is not None for grad in grads[:-1])
        parts: list[Part] | None = ctx.parts
        if parts is None and setting.term.closed and not drawn:
            parts = setting.measure(ctx.parameters[:count], ctx.parameters[count:])
        elif parts is None:
            saved, fields = ctx.saved_tensors, len(Part.__dataclass_fields__)
            parts = [Part(*saved[i : i + fields]) for i in range(0, len(saved), fields)]
        if drawn:
            ctx.parts = setting.parts = None
            setting.spent = True
        scale = 0.0 if grads[-1] is None else float(grads[-1])
        wanted = ctx.needs_input_grad[1:]
        result: list[Tensor | None] = [None] * (2 * count)
        for slab, part in zip(setting.slabs, parts, strict=True):
            flats = _gradients(setting, slab, part, scale, samples, means, spreads)
            for place, flat in zip((0, count), flats, strict=True):
                if flat is not None:
                    for index, grad in zip(slab.indices, slab.shaped(flat), strict=True):
                        result[place + index] = grad if wanted[place + index] else None
        if scale == 0:
            _pass_on(result, samples, means, spreads)
        return (None, *result)


def _pass_on(
    result: list[Tensor | None],
    samples: list[Tensor | None],
    means: list[Tensor | None],
    spreads: list[Tensor | None],
) -> None:
    """Without a KL term, give weights that were not used no gradient, and μ just the one that arrived.

    It has to be the very tensor: where two weights share one, autograd makes copies.
    """
    for index, (sample, mean, spread) in enumerate(zip(samples, means, spreads, strict=True)):
        if result[index] is not None and (sample is None or mean is None):
            result[index] = mean if sample is None else sample
        if sample is None and mean is None and spread is None:
            result[len(samples) + index] = None


def _gradients(
    setting: _Setting,
    slab: Slab,
    part: Part,
    scale: float,
    samples: list[Tensor | None],
    means: list[Tensor | None],
    spreads: list[Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a slab's μ and ρ from those of its samples, means, spreads and KL term."""
    pool, term = setting.pool, setting.term
    to_sample = slab.flat_gradient(pool, samples)
    to_mean = slab.flat_gradient(pool, means)
    to_spread = slab.flat_gradient(pool, spreads)
    if scale:
        to_sample = term.to_sample(pool, part, scale, to_sample)
    to_noise = to_sample
    if setting.spread is Spread.DEVIATION:
        to_noise = _sum(to_sample, to_spread)
    to_std = slab.take(pool)
    if to_noise is None:
        to_std.zero_()
    else:
        part.times_noise(to_noise, to_std)
    if setting.spread is Spread.VARIANCE and to_spread is not None:
        to_std.addcmul_(to_spread, part.std, value=2)
    to_mean = _sum(to_sample, to_mean)
    if scale:
        term.to_std(pool, slab, setting.names, part, scale, to_std)
        to_mean = term.to_mean(pool, slab, setting.names, part, scale, to_mean)
    return to_mean, to_std.mul_(part.slope)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
