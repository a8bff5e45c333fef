"""A draw of Gaussian weights with its gradients: w = μ + σε, σ = softplus(ρ).

| symbol | here |
| --- | --- |
| w = μ + log(1 + exp ρ) · ε | `_DrawFunction.forward` |
| Δμ = ∂f/∂w + ∂f/∂μ | `_DrawFunction.backward`, `to_mean` |
| Δρ = ∂f/∂w · ε / (1 + exp(−ρ)) + ∂f/∂ρ | `_DrawFunction.backward`, `to_std` |

(C. Blundell et al., Weight Uncertainty in Neural Networks, ICML 2015, section 3.2.)

Each slab of weights is one node of the graph. Its last output is a zero, the token; adding the KL term's
value to it gives a number whose gradient arrives in the draw's own backward pass, where μ, σ and ε are
available and the KL term's gradients cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torchbayes.core.autocast import no_autocast
from torchbayes.core.noise import normal_
from torchbayes.core.workspace import Workspace
from torchbayes.prior import Prior
from torchbayes.variational.flat_weights import Slab
from torchbayes.variational.kl import KLTerm, Part, add_divided, kl_term, plus
from torchbayes.variational.softplus import bounds, softplus

__all__ = ["Draw", "Drawn", "Spread", "bbb_draw", "bbb_gradients"]


def bbb_draw(
    w: Tensor, epsilon: Tensor, std: Tensor, slope: Tensor, mean: Tensor, rho: Tensor, eta: Tensor,
    *, low: float, high: float,
) -> None:  # fmt: skip
    """Write a draw w = μ + σε, ε = η, σ = softplus(ρ) and dσ/dρ to the first four; ε may be η's memory."""
    softplus(std, slope, rho, low=low, high=high)
    torch.addcmul(mean, std, eta, out=w)
    epsilon.copy_(eta)


def bbb_gradients(
    to_mean: Tensor, to_rho: Tensor, g: Tensor, epsilon: Tensor, std: Tensor, slope: Tensor,
    mean: Tensor, *, scale: float | Tensor, m: float, delta: float,
) -> None:  # fmt: skip
    """Write Δμ = g + s δ(μ−m) and Δρ = dσ/dρ (g ε + s (δσ − 1/σ)) to the first two.

    `g` is ∂f/∂w, s is the weight `scale` of the KL term, and N(m, 1/δ) is the prior.
    """
    plus(g, mean, scale * delta, out=to_mean).sub_(scale * delta * m)
    torch.mul(g, epsilon, out=to_rho)
    plus(to_rho, std, scale * delta, out=to_rho)
    add_divided(to_rho, -scale, std).mul_(slope)


class Spread(Enum):
    """What an estimator needs to know of a weight besides its mean and a sample."""

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


class _Steps:
    """Counts the steps of all optimisers of torch's kind, from the first time that it is asked."""

    def __init__(self) -> None:
        self._count = 0
        self._hook: RemovableHandle | None = None

    def taken(self) -> int:
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._add)
        return self._count

    def stop(self) -> None:
        """Count no more until it is asked again, which only tests need."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _add(self, *_about: Any) -> None:
        self._count += 1


_steps = _Steps()


def _first(tensor: Tensor) -> float:
    return float(tensor.detach()[(0,) * tensor.dim()]) if tensor.numel() else 0.0


@dataclass
class _Slot:
    """The state that the draw of a slab and its gradient share.

    It must not refer to the draw's outputs: a cycle through the graph would keep their memory in use.
    """

    space: Workspace
    slab: Slab
    term: KLTerm
    spread: Spread
    generator: torch.Generator | None
    eager: bool
    part: Part | None = None
    kl: Tensor | None = None
    spent: bool = False

    def _start(self, parameters: Sequence[Tensor]) -> tuple[Part, Tensor]:
        """Return μ, with buffers for σ and its slope, and ρ, all flat."""
        slab, space, count = self.slab, self.space, len(self.slab.names)
        mean, rho = slab.flat(space, parameters[:count]), slab.flat(space, parameters[count:])
        return Part(slab, mean, slab.take(space), slab.take(space)), rho

    def measure(self, parameters: Sequence[Tensor]) -> Part:
        """Compute μ and σ, flat."""
        part, rho = self._start(parameters)
        self._softplus(part, rho)
        return part

    def _softplus(self, part: Part, rho: Tensor) -> None:
        columns = [part.std], [part.slope]
        self.space.apply(softplus, columns, [[rho]], **bounds(rho.dtype))

    def draw(self, parameters: Sequence[Tensor]) -> tuple[Part, list[Tensor], list[Tensor]]:
        """Draw; return μ and σ, the samples of the slab's weights, and their spreads if needed."""
        part, rho = self._start(parameters)
        sample, noise, spread = self.slab.take(self.space), self.slab.take(self.space), None
        if self.spread is Spread.NONE:
            part.noise = noise
            part.sums = self.space.apply(
                bbb_draw, [[sample], [noise], [part.std], [part.slope]], [[part.mean], [rho]],
                self.generator, eta_in=1, **bounds(rho.dtype),
            )  # fmt: skip
        else:
            self._softplus(part, rho)
            spread = self._sample(part, normal_(noise, self.generator), sample)
        if self.term.needs_sample:
            part.sample = sample
        spreads = [] if spread is None else self.slab.shaped(spread)
        # Not as views: autograd considers a view changed whenever anything in its buffer has changed.
        samples = [weight.detach() for weight in self.slab.weights(self.space, sample)]
        return part, samples, [weight.detach() for weight in spreads]

    def _sample(self, part: Part, noise: Tensor, out: Tensor) -> Tensor:
        """Write w = μ + σε to `out`; return the spread that the estimator needs."""
        if self.spread is Spread.DEVIATION:
            part.deviation = noise.mul_(part.std)
            torch.add(part.mean, part.deviation, out=out)
            return part.deviation
        part.noise = noise
        torch.addcmul(part.mean, part.std, noise, out=out)
        return torch.mul(part.std, part.std, out=self.slab.take(self.space))

    def value(self) -> Tensor:
        """Return the slab's share of the KL term."""
        if self.kl is None:
            assert self.part is not None
            self.kl = self.term.value(self.space, self.part)
        return self.kl

    def gradients(
        self, part: Part, scale: float | Tensor | None, grads: Sequence[Sequence[Tensor | None]]
    ) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of μ and ρ from those of samples, means, spreads and the KL term, if any."""
        space, slab, term = self.space, self.slab, self.term
        to_sample, to_mean, to_spread = (slab.flat_gradient(space, given) for given in grads)
        if scale is not None:
            to_sample = term.to_sample(space, part, scale, to_sample)
            flats = self._fused_gradients(part, scale, to_sample, to_mean)
            if flats is not None:
                return flats
        to_deviation = to_sample
        if self.spread is Spread.DEVIATION:
            to_deviation = _sum(to_sample, to_spread)
        to_std = slab.take(space)
        if to_deviation is None:
            to_std.zero_()
        else:
            part.times_noise(to_deviation, to_std)
        if self.spread is Spread.VARIANCE and to_spread is not None:
            to_std.addcmul_(to_spread, part.std, value=2)
        to_mean = _sum(to_sample, to_mean)
        if scale is not None:
            term.to_std(space, part, scale, to_std)
            to_mean = term.to_mean(space, part, scale, to_mean)
        return to_mean, to_std.mul_(part.slope)

    def _fused_gradients(
        self, part: Part, scale: float | Tensor, to_sample: Tensor | None, to_mean: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the gradients of μ and ρ in one pass if there is only a sample and a simple prior."""
        moments = self.term.moments()
        plain = self.spread is Spread.NONE and to_mean is None
        if not plain or to_sample is None or part.noise is None or moments is None:
            return None
        outs = self.slab.take(self.space), self.slab.take(self.space)
        given = to_sample, part.noise, part.std, part.slope, part.mean
        self.space.apply(
            bbb_gradients, [[out] for out in outs], [[tensor] for tensor in given],
            scale=scale, m=moments[0], delta=moments[1],
        )  # fmt: skip
        return outs


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


class Draw:
    """One draw of a Gaussian over some weights; without noise, the Gaussian alone.

    Args:
        space: Source of large tensors.
        slabs: The weights in slabs.
        means: μ of every weight.
        rhos: ρ of every weight.
        prior: The prior of the KL term.
        spread: What the estimator needs.
        noise: Whether to draw.
        kl: Whether `kl` is likely to be called: its value costs less while the draw is in the cache.
        generator: Source of ε.

    Attributes:
        prior: The prior.
        drawn: The drawn weights, in their order.
    """

    def __init__(
        self, space: Workspace, slabs: list[Slab], means: Sequence[Tensor], rhos: Sequence[Tensor],
        prior: Prior, *, spread: Spread, noise: bool, kl: bool, generator: torch.Generator | None,
    ) -> None:  # fmt: skip
        self.prior, self._term = prior, kl_term(prior)
        self._parameters = [*means, *rhos]
        self._seen = self._fingerprint()
        self._slots: list[_Slot] = []
        self._tokens: list[Tensor] = []
        drawn: dict[int, Drawn] = {}
        for slab in slabs:  # one after another, while what they share is in the cache
            own = slab.names
            slot = _Slot(space, slab, self._term, spread, generator, kl)
            *outputs, token = _DrawFunction.apply(  # type: ignore[no-untyped-call]
                slot, noise, *(means[i] for i in slab.indices), *(rhos[i] for i in slab.indices)
            )
            self._slots.append(slot)
            self._tokens.append(token)
            if noise:
                rows = [outputs[i :: len(own)] for i in range(len(own))]
                drawn |= {
                    i: Drawn(name, *row)
                    for i, name, row in zip(slab.indices, own, rows, strict=True)
                }
        self.drawn = [drawn[i] for i in sorted(drawn)]

    def _fingerprint(self) -> tuple[list[int], list[float]]:
        # torch's fused optimisers do not increment a tensor's version: compare some values, too. To read
        # an accelerator's would be to wait for it: there any optimiser's step counts as a change.
        ends = [self._parameters[0], self._parameters[-1]]
        there = any(tensor.device.type != "cpu" for tensor in ends)
        seen = [float(_steps.taken())] if there else [_first(tensor) for tensor in ends]
        return [tensor._version for tensor in self._parameters], seen

    def current(self) -> bool:
        """Whether a KL term added to this draw is that of the current parameters."""
        if any(slot.spent for slot in self._slots):
            return False
        if torch.is_grad_enabled() and not all(token.requires_grad for token in self._tokens):
            return False
        return self._fingerprint() == self._seen

    def release(self) -> None:
        """Release the drawn weights, whose memory then serves their gradients, unless `kl` needs them."""
        if self._term.complete:
            self.drawn = []

    def kl(self) -> Tensor:
        """Return the KL term, differentiable through this draw."""
        device = self._tokens[0].device
        total = torch.stack([token.to(device) for token in self._tokens]).sum()
        with torch.no_grad(), no_autocast(device):
            value = torch.stack([slot.value().to(device) for slot in self._slots]).sum()
        if not self._term.complete:
            weights = {weight.name: weight.sample for weight in self.drawn}
            value = value - self.prior.log_prob(weights)
        return total + value.to(total.dtype)


class _DrawFunction(torch.autograd.Function):
    """Map a slab's μ and ρ to its samples, its means and spreads if needed, and the token."""

    @staticmethod
    def forward(ctx: Any, slot: _Slot, noise: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        slab, means = slot.slab, parameters[: len(slot.slab.names)]
        wide = torch.promote_types(slab.dtype, torch.float32)
        token = torch.zeros((), dtype=wide, device=slab.device)
        with no_autocast(slab.device):
            part, samples, spreads = (
                slot.draw(parameters) if noise else (slot.measure(parameters), [], [])
            )
            slot.part = part
            if slot.eager:
                slot.value()
        # Held as well as saved. Autograd releases what is saved when the graph has been used, `backward`
        # what is held, so that buffers are free in time for the next draw; and the KL term and the
        # likelihood can be differentiated one after the other.
        ctx.part = part
        ctx.slot, ctx.parameters = slot, parameters
        ctx.save_for_backward(*part.tensors())
        aliases = [mean.detach() for mean in means] if spreads else []
        return (*samples, *aliases, *spreads, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        slot: _Slot = ctx.slot
        count = len(slot.slab.names)
        padded = [*grads[:-1], *[None] * (3 * count)]
        given = [padded[i * count : (i + 1) * count] for i in range(3)]
        drawn = any(grad is not None for grad in grads[:-1])
        part: Part | None = ctx.part
        if part is None and slot.term.closed and not drawn:
            part = slot.measure(ctx.parameters)
        elif part is None:
            part = Part(slot.slab, *ctx.saved_tensors)
        if drawn:
            ctx.part = slot.part = None
            slot.spent = True
        scale: float | Tensor | None = grads[-1]
        if isinstance(scale, Tensor) and scale.device.type == "cpu":
            scale = float(scale) or None
        result: list[Tensor | None] = []
        for flat in slot.gradients(part, scale, given):
            result.extend([None] * count if flat is None else slot.slab.shaped(flat))
        if scale is None:
            _pass_on(result, given)
        wanted = zip(result, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(grad if needed else None for grad, needed in wanted))


def _pass_on(result: list[Tensor | None], grads: Sequence[Sequence[Tensor | None]]) -> None:
    """Without a KL term, give unused weights no gradient, and μ the gradient that arrived.

    It must be the very tensor: where two weights share one, autograd makes the copies.
    """
    for index, (sample, mean, spread) in enumerate(zip(*grads, strict=True)):
        if sample is None or mean is None:
            result[index] = mean if sample is None else sample
        if sample is None and mean is None and spread is None:
            result[len(result) // 2 + index] = None
