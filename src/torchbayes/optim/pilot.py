"""A pilot run: Langevin dynamics from the mode to where the posterior's mass is, with a scale that follows.

At the mode of a network that fits its data the gradients, their noise and the curvature can be far smaller
than where the posterior's mass is: steps that suit the mode throw the network off. So the scale of every
weight, the noise and the largest curvature are running averages here, and the steps follow them. Such a
chain is biased, which does not matter: no sample is taken, and the sampler goes on with the last averages.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.noise import normals_
from torchbayes.optim.survey import dot, inverse_root, scale_of

__all__ = ["Pilot"]

# Share of the variance of a Langevin step that the gradient's noise may have, and updates of a round of the
# power iteration.
_SHARE, _ROUND = 0.2, 16

State = dict[str, Any]


class Pilot:
    """One update after another of a pilot run.

    Args:
        params: The weights.
        states: Their states, each with a `scale`; what is measured is kept there.
        updates: Number of updates of the run.
        batch: Examples per batch.
        n: Factor of the mean loss in the energy.
        precisions: The prior's precision for each tensor.
    """

    def __init__(
        self, params: list[Tensor], states: list[State], updates: int, batch: float, n: float,
        precisions: list[float],
    ) -> None:  # fmt: skip
        self.params, self.states, self.updates, self.precisions = (
            params,
            states,
            updates,
            precisions,
        )
        self.per_noise = batch / n
        self.count = sum(p.numel() for p in params)
        self.memory = max(20, updates // 4)

    def advance(self, step: int, energy: list[Tensor], generator: torch.Generator) -> None:
        """Move the weights once.

        Args:
            step: Number of the update, from 1.
            energy: The energy's gradient.
            generator: Source of the noise.
        """
        facts = self.states[0]["warmup"]
        if step == 1:
            for state, gradient in zip(self.states, energy, strict=True):
                state["curvature"] = state["scale"].pow(-2)
                state["last_gradient"] = gradient.clone()
                state["direction"], state["image"] = (
                    torch.zeros_like(gradient),
                    torch.zeros_like(gradient),
                )
        else:
            self._follow(step, energy, facts)
        noise, top = facts["noise"], facts["top"]
        epsilon = min(4 * _SHARE / max(noise, 1e-9), 1 / top, 0.3) * min(1.0, step / 20)
        scale = [state["scale"] for state in self.states]
        eta = [torch.empty_like(p) for p in self.params]
        normals_(eta, generator)
        torch._foreach_mul_(eta, math.sqrt(epsilon))
        torch._foreach_addcmul_(eta, energy, scale, -epsilon / 2)
        torch._foreach_addcmul_(self.params, eta, scale)
        if step == self.updates:
            for state in self.states:
                for name in ("curvature", "last_gradient", "direction", "image"):
                    del state[name]

    def _follow(self, step: int, energy: list[Tensor], facts: State) -> None:
        weight = 1 / min(step + 20, self.memory)
        if facts["whole"]:
            for state, gradient in zip(self.states, energy, strict=True):
                # E (∂U)² = E ∂²U, in which E is over the posterior.
                mean = state["image"].lerp_(gradient.square(), weight)
                state["scale"] = scale_of(torch.maximum(state["curvature"], mean))
            return
        last = [state["last_gradient"] for state in self.states]
        white = list(torch._foreach_sub(energy, last))
        torch._foreach_copy_(last, energy)
        for state, difference, precision in zip(self.states, white, self.precisions, strict=True):
            noisy = difference.square().mul_(0.5 * self.per_noise).add_(precision)
            state["scale"] = scale_of(state["curvature"].lerp_(noisy, weight).clone())
            difference.mul_(state["scale"])
        self._iterate(step, white, facts)

    def _iterate(self, step: int, white: list[Tensor], facts: State) -> None:
        """Follow the noise and, by power iteration with its covariance, the largest curvature."""
        image, u = ([state[name] for state in self.states] for name in ("image", "direction"))
        square = dot(white, white)
        facts["noise"] += (0.5 * square / self.count - facts["noise"]) / self.memory
        if step == 2:
            torch._foreach_copy_(u, white)
            torch._foreach_mul_(u, inverse_root(square))
            return
        along = dot(white, u)
        torch._foreach_add_(image, white, alpha=along)
        now = max(1.0, 0.5 * along * along / max(facts["noise"], 1e-30))
        facts["top"] += (now - facts["top"]) / self.memory
        if step % _ROUND == 0:
            torch._foreach_copy_(u, image)
            torch._foreach_mul_(u, inverse_root(dot(image, image)))
            torch._foreach_zero_(image)
