"""Warm-up of a sampler that tunes itself: a descent to the mode, and the scale of every weight.

A sampler whose step is not given runs in other coordinates, φᵢ = θᵢ/sᵢ: its algorithm is that of its paper,
exactly, for a network with the weights s∘φ. The warm-up finds s, and is over before the first sample: a
scale that went on adapting would bias the samples.

1. *Descent*: Adam on the energy, with a step that rises shortly and falls to 0 on half a cosine. A sampler
   alone, with steps that suit the posterior, is slow to learn or does not learn at all.
2. *Survey* of the curvature and the noise there (`torchbayes.optim.survey`).
3. *Pilot*: the sampler itself moves from the mode, where gradients can be far smaller than around it, to
   where the posterior's mass is.
4. A second survey.
5. *Equilibration*: the sampler itself, with steps that fall to their final size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from torchbayes.optim.pilot import Pilot
from torchbayes.optim.survey import Measured, Survey, dot, inner

__all__ = ["PlannedRun", "WarmUp", "langevin_step", "momentum_step"]

# Updates of a run, and examples per batch, unless they are given.
_STEPS, _BATCH = 2000, 100
# The updates of the descent, and the least and the largest share of the run that it may have.
_DESCENT, _LEAST_DESCENT, _MOST_DESCENT = 1200, 0.3, 0.7
# Shares of the run: from the descent to the first sample, but no more than half of what is left then, and of
# that a survey and the pilot run.
_REST, _SURVEY, _PILOT = 0.15, 0.15, 0.4
_LEAST_SURVEY, _MOST_SURVEY = 6, 200
# Updates that the descent leaves in a short run: the survey's 6, 2 of the pilot run and 4 to equilibrate.
_LEAST_AFTER = 12
# Adam's largest step: how far a weight can go during the descent, and relative to the weights of its tensor.
_ADAM_LOW, _ADAM_HIGH, _REACH, _RELATIVE = 1e-3, 1e-2, 8.0, 0.05
# The step of the descent falls from this share of it on. Its weights are averaged over 1.5 epochs at its end,
# but over no less and no more than these shares: with fewer examples, the mean would be off by more than the
# posterior's width.
_FALL, _LEAST_AVERAGED, _MOST_AVERAGED = 0.8, 0.15, 0.5
# A cold chain stays where the descent has led it. So the descent has more of a short run, and smaller steps:
# a transformer (512 sequences, 512 updates) came to accuracies of 98.3 and 98.7 % with them, and to 95.8 and
# 94.7 % with those above. Few weights are averaged, as they still improve: the mean's NLL was up to twice
# that of the last.
_COLD_DESCENT, _COLD_HIGH, _COLD_AVERAGED = 0.8, 3e-3, 0.02

_ADAM: dict[str, Any] = {
    "amsgrad": False, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "maximize": False
}  # fmt: skip

State = dict[str, Any]


def _planned(steps: int, cold: bool) -> tuple[float, float]:
    """Return the updates of the descent, and those from there to the first sample, by default."""
    most = _COLD_DESCENT if cold else _MOST_DESCENT
    descent = min(max(_DESCENT, _LEAST_DESCENT * steps), most * steps)
    return descent, min(_REST * steps, (steps - descent) / 2)


@dataclass(frozen=True)
class PlannedRun:
    """What a sampler that tunes itself is told about its run.

    Args:
        steps: Number of updates; 2,000 if None.
        batch_size: Examples per batch; 100 if None.
        burn_in: Share of the updates before the first sample; a rule of `steps` if None.
    """

    steps: int | None = None
    batch_size: int | None = None
    burn_in: float | None = None

    def warm_up(self, train_size: int, cold: bool = False) -> WarmUp | None:
        """Return the course of the warm-up; None if there is no time for one.

        Args:
            train_size: Number of training examples.
            cold: Whether the posterior is a cold one (`torchbayes.optim.cold`).
        """
        for name, value in (("steps", self.steps), ("batch_size", self.batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: expected a whole number of at least 1")
        steps = _STEPS if self.steps is None else self.steps
        share = sum(_planned(steps, cold)) / steps if self.burn_in is None else self.burn_in
        if not 0 <= share < 1:
            raise ValueError(
                f"burn_in is {share:g}: expected the share of the run before the first sample, from 0 to "
                "below 1; no update would be left to sample from"
            )
        updates = min(round(share * steps), steps - 1)
        if updates < WarmUp.LEAST:
            return None
        batch = _BATCH if self.batch_size is None else self.batch_size
        return WarmUp(updates, steps, min(batch, train_size), train_size, cold)


@dataclass(frozen=True)
class WarmUp:
    """The course of a warm-up.

    Args:
        updates: Its number of updates, at least `WarmUp.LEAST`.
        steps: Number of updates of the run.
        batch: Examples per batch.
        train_size: Number of training examples.
        cold: Whether the posterior is a cold one.
    """

    updates: int
    steps: int
    batch: float
    train_size: int
    cold: bool = False

    LEAST = 20

    @property
    def descent(self) -> int:
        """Updates of the descent."""
        descent, rest = _planned(self.steps, self.cold)
        return min(round(self.updates * descent / (descent + rest)), self.updates - _LEAST_AFTER)

    @property
    def surveyed(self) -> int:
        """The last update of the survey."""
        share = round(_SURVEY * (self.updates - self.descent))
        return self.descent + min(max(_LEAST_SURVEY, share), _MOST_SURVEY)

    @property
    def tuned(self) -> int:
        """The last update of the pilot run: from the next one on the sampler itself moves the weights."""
        return self.surveyed + round(_PILOT * (self.updates - self.surveyed))

    @property
    def held(self) -> int:
        """The last update at which thermostats are held and steps are longer than later."""
        return (self.tuned + self.updates) // 2

    def boost(self, step: int, boost: float) -> float:
        """Return the factor of the sampler's steps at an update, which falls from `boost` to 1."""
        if step >= self.held:
            return 1.0
        return math.pow(boost, 1 - (step - self.tuned) / (self.held - self.tuned))

    def advance(
        self, params: list[Tensor], states: list[State], gradients: list[Tensor], *, step: int,
        n: float, decay: float, precisions: list[float], factor: float, generator: torch.Generator,
    ) -> Measured | None:  # fmt: skip
        """Take one of the first `tuned` updates.

        Args:
            params: The weights.
            states: Their states.
            gradients: The gradients of the mean loss, with that of a prior other than N(0, 1/decay).
            step: Number of the update, from 1.
            n: Factor of the mean loss in the energy.
            decay: Precision of a prior whose gradient is to be added, or 0.
            precisions: The prior's precision for each tensor.
            factor: Factor of the steps that a schedule gives.
            generator: Source of random numbers.

        Returns:
            What was found, after the last of them. The states then have a `scale`.
        """
        if step == 1:
            states[0]["warmup"] = {"size": 0.0}
        facts = states[0]["warmup"]
        for state in states:  # tensors that have no gradient at some update go on by themselves
            state["warmup"] = facts
        if step <= self.descent:
            self._descend(params, states, gradients, step, n, decay, factor)
            return None
        energy = list(torch._foreach_mul(gradients, n))
        torch._foreach_add_(energy, params, alpha=decay)
        about = (self.batch, n, precisions)
        if step <= self.surveyed:
            survey = Survey(params, states, self.surveyed - self.descent, *about)
            survey.advance(step - self.descent, energy, generator)
            return None
        pilot = Pilot(params, states, self.tuned - self.surveyed, *about)
        pilot.advance(step - self.surveyed, energy, generator)
        if step < self.tuned:
            return None
        for state in states:
            del state["warmup"]
        left, samples = self.updates - self.tuned, self.steps - self.updates
        return Measured(facts["noise"], facts["top"], max(1, left), samples)

    def _descend(
        self, params: list[Tensor], states: list[State], gradients: list[Tensor], step: int,
        n: float, decay: float, factor: float,
    ) -> None:  # fmt: skip
        least = _COLD_AVERAGED if self.cold else _LEAST_AVERAGED
        averaged = min(
            max(least * self.descent, 1.5 * self.train_size / self.batch),
            _MOST_AVERAGED * self.descent,
        )
        begun = math.ceil(self.descent - averaged)
        facts = states[0]["warmup"]
        if step == 1:
            for state, p in zip(states, params, strict=True):
                state |= {name: torch.zeros_like(p) for name in ("mean", "second", "average")}
        there = params[0].device.type != "cpu"
        if there:  # without a look at it
            square = inner(gradients, gradients) * (n * n)
            facts["size"] = square.clamp_min(facts["size"])
        else:
            facts["size"] = max(facts["size"], n * n * dot(gradients, gradients))
        high = _COLD_HIGH if self.cold else _ADAM_HIGH
        rate = min(max(_REACH / self.descent, _ADAM_LOW), high)
        rise = min(1.0, step / max(1, self.descent // 20))
        left = (self.descent - step + 0.5) / self.descent
        now = factor * rise * min(1.0, left / (1 - _FALL))
        for state, p, gradient in zip(states, params, gradients, strict=True):
            moments = [state["mean"]], [state["second"]]
            if there:
                _adam_there(p, gradient.add(p, alpha=decay / n), moments, step, rate, now)
            else:
                own = min(rate, max(_ADAM_LOW, _RELATIVE * float(p.square().mean().sqrt())))
                adam(
                    [p], [gradient], *moments, [], [torch.tensor(step - 1.0)], lr=own * now,
                    weight_decay=decay / n, fused=True, **_ADAM,
                )  # fmt: skip
            if step >= begun:
                state["average"].lerp_(p, 2 / (step - begun + 2))
            if step == self.descent:
                p.copy_(state["average"])
                for name in ("mean", "second", "average"):
                    del state[name]


def _adam_there(
    p: Tensor, gradient: Tensor, moments: tuple[list[Tensor], list[Tensor]], step: int, rate: float,
    now: float,
) -> None:  # fmt: skip
    """Take a step of Adam on an accelerator, where a rate that depends on the weights is not looked at."""
    fused = p.device.type == "cuda"
    count = torch.full((), step - 1.0, device=p.device if fused else "cpu")
    move = torch.zeros_like(p)
    adam([move], [gradient], *moments, [], [count], lr=now, weight_decay=0.0, fused=fused, **_ADAM)
    own = (_RELATIVE * p.square().mean().sqrt()).clamp_min(_ADAM_LOW).clamp_max(rate)
    p.addcmul_(move, own)


def langevin_step(found: Measured) -> tuple[float, float]:
    """Return the step ε of Langevin dynamics, and the factor by which it is larger at first.

    In coordinates of mean curvature 1, the gradient's noise ν adds the share κ = εν/4 to the variance, and
    the variance is forgotten at the rate ε.
    """
    share = min(max(10 * found.noise / found.samples, 0.05), 0.1)
    epsilon = min(1 / found.top, 4 * share / max(found.noise, 1e-9), 0.3)
    needed = 3 / (epsilon * found.left)
    most = (4 / max(epsilon * found.noise, 1e-9), 1 / (found.top * epsilon), 30.0)
    return epsilon, max(1.0, min(needed, *most))


def momentum_step(found: Measured) -> tuple[float, float, float]:
    """Return the step s and the friction f of an update, and the factor by which both are larger at first.

    In coordinates of mean curvature 1 and for a mass of 1, the gradient's noise ν makes up the share κ =
    s²ν/(2f) of the noise that goes with the friction; the weights are forgotten at the rate s²/f.
    """
    share = min(max(10 * found.noise / found.samples, 0.05), 0.3)
    stiffest = math.sqrt(found.top)
    s = min(0.7 / stiffest, math.sqrt(share / max(found.noise, 1e-9)), 0.3)
    f = max(s * s * found.noise / (2 * share), s, 0.4 * s * stiffest)
    needed = 3 * f / (s * s * found.left)
    most = (0.9 / share, 1 / f, 0.8 / stiffest / s)
    return s, f, max(1.0, min(needed, *most))
