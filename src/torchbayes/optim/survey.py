"""The scale of every weight, the noise and the largest curvature, measured from gradients alone.

The weights are held at a point θ*. Over K updates the gradients G of the energy U tell

- from batches: the variance Vᵢ of Gᵢ. By the information equality it is Hᵢᵢ·n/B, for the factor n of the mean
  loss and B examples per batch, so that Hᵢᵢ ≈ Vᵢ·B/n + δ with the precision δ of the prior.
- from whole data sets, whose gradients do not vary: at displacements s∘η of the weights by random normal
  numbers, E (Gᵢ − Gᵢ*)² = Σⱼ (Hᵢⱼ sⱼ)². The root over sᵢ stands for Hᵢᵢ: the rows' norms rather than the
  diagonal, as in Dauphin et al., Equilibrated adaptive learning rates, 2015.

Then, in coordinates φᵢ = θᵢ √Hᵢᵢ in which the mean curvature is 1: the noise ν, which is the mean variance of
the gradient over batches; and the largest curvature, by power iteration with the noise's covariance or, for
whole data sets, with displacements along the last difference of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchbayes.core.noise import normals_

__all__ = ["Measured", "Survey", "dot", "inner", "inverse_root", "scale_of"]

# The share of its tensor's mean curvature that every weight has: one without a gradient, such as that of a
# unit that is switched off, would otherwise have a step that is wild once it has one.
_SHRINKAGE = 0.1

# Whole data sets: sizes of displacements, in root mean squares of a tensor's weights and in scales.
_FIRST_REACH, _REACH = 0.02, 0.1

# Rounds of the power iteration; the last one measures.
_ROUNDS = 4

State = dict[str, Any]


class Measured(NamedTuple):
    """What a survey has found, in coordinates in which the mean curvature is 1.

    Attributes:
        noise: Mean variance ν of the energy's gradient over batches.
        top: Largest curvature of all directions, at least 1.
        left: Updates from here to the first sample.
        samples: Updates from there to the end.
    """

    noise: float
    top: float
    left: int = 1
    samples: int = 1


class Survey:
    """Measures at the present weights, which it displaces and puts back.

    Args:
        params: The weights.
        states: Their states; what is measured so far is kept there, and in the end each one's `scale`.
        updates: Number of updates.
        batch: Examples per batch.
        n: Factor of the mean loss in the energy.
        precisions: The prior's precision for each tensor.
    """

    def __init__(
        self, params: list[Tensor], states: list[State], updates: int, batch: float, n: float,
        precisions: list[float],
    ) -> None:  # fmt: skip
        self.params, self.states, self.precisions, self.n = params, states, precisions, n
        self.updates, self.batch = updates, batch
        self.half = max(2, updates // 2)
        self.count = sum(p.numel() for p in params)

    def advance(self, step: int, energy: list[Tensor], generator: torch.Generator) -> None:
        """Take in the energy's gradient at update `step`, from 1."""
        if step == 1:
            self._begin(energy)
        facts = self.states[0]["warmup"]
        last = self._column("last_gradient")
        difference = list(torch._foreach_sub(energy, last))
        if step == 2:
            facts["whole"] = not dot(difference, difference) > 1e-10 * facts["size"]
        if facts["whole"]:
            self._with_displacements(step, difference, facts, generator)
        else:
            torch._foreach_copy_(last, energy)
            self._with_noise(step, difference, facts)

    def _begin(self, energy: list[Tensor]) -> None:
        for state, p, gradient in zip(self.states, self.params, energy, strict=True):
            state["center"], state["last_gradient"] = p.clone(), gradient.clone()
            state["direction"], state["image"] = torch.zeros_like(p), torch.zeros_like(p)
        self.states[0]["warmup"] |= {"whole": False, "noise": 0.0, "top": 0.0, "sum": 0.0, "pairs": 0,
            "rounds": 0}  # fmt: skip

    # Batches.

    def _with_noise(self, step: int, difference: list[Tensor], facts: State) -> None:
        image, u = self._column("image"), self._column("direction")
        if 2 <= step <= self.half:
            torch._foreach_addcmul_(image, difference, difference, 0.5 / (self.half - 1))
        if step == self.half:
            for state, d in zip(self.states, self.precisions, strict=True):
                state["scale"] = scale_of(state["image"] * (self.batch / self.n) + d)
                state["image"].zero_()
        if step > self.half:
            white = list(torch._foreach_mul(difference, self._column("scale")))
            squares = dot(white, white)
            facts["noise"] += 0.5 * squares / self.count
            facts["pairs"] += 1
            place, length = step - self.half, max(1, (self.updates - self.half) // _ROUNDS)
            if place == 1:
                torch._foreach_copy_(u, white)
                torch._foreach_mul_(u, inverse_root(squares))
            else:
                along = dot(white, u)
                torch._foreach_add_(image, white, alpha=along)
                facts["sum"] += 0.5 * along * along
                facts["rounds"] += 1
                facts["top"] = facts["sum"] / facts["rounds"]
                if place % length == 0 and place < _ROUNDS * length:
                    torch._foreach_copy_(u, image)
                    torch._foreach_mul_(u, inverse_root(dot(image, image)))
                    torch._foreach_zero_(image)
                    facts["sum"], facts["rounds"] = 0.0, 0
        if step == self.updates:
            facts["noise"] /= max(1, facts["pairs"])
            facts["top"] = max(1.0, facts["top"] / max(facts["noise"], 1e-30))
            self._end()

    # Whole data sets.

    def _with_displacements(
        self, step: int, difference: list[Tensor], facts: State, generator: torch.Generator
    ) -> None:
        center = self._column("center")
        if step == 2:
            for state, p in zip(self.states, center, strict=True):
                size = max(float(p.square().mean().sqrt()), 1e-3)
                state["scale"] = torch.full_like(p, size)
        scale = self._column("scale")
        reach = _FIRST_REACH if step <= self.half else _REACH
        white = list(torch._foreach_mul(difference, scale))
        if 2 < step <= self.half:
            torch._foreach_addcmul_(self._column("image"), white, white)
        if step == self.half:
            for state, d in zip(self.states, self.precisions, strict=True):
                rows = (state["image"] / max(1, step - 2)).sqrt_() / (reach * state["scale"] ** 2)
                state["scale"] = scale_of(rows.clamp_min_(d))
            scale, reach = self._column("scale"), _REACH
        iterations = min(15, (self.updates - self.half) // 2)
        randomly = step <= self.updates - iterations
        if step > self.half:
            norm = math.sqrt(dot(white, white))
            if (
                randomly
            ):  # displaced by φ = reach·η, whose product with the curvature is the mean curvature
                moved = list(torch._foreach_sub(self.params, center))
                facts["sum"] += dot(moved, difference) / (reach**2 * self.count)
                facts["pairs"] += 1
            else:
                facts["top"] = max(facts["top"] * 0.5, norm / (reach * math.sqrt(self.count)))
        torch._foreach_copy_(self.params, center)
        if step == self.updates:
            mean = min(max(facts["sum"] / max(1, facts["pairs"]), 1e-2), 1e2)
            torch._foreach_mul_(scale, mean**-0.5)
            facts["noise"], facts["top"] = 0.0, max(1.0, facts["top"] / mean)
            self._end()
            return
        if step < self.updates - iterations or step <= self.half:
            eta = [torch.empty_like(p) for p in self.params]
            normals_(eta, generator)
            torch._foreach_addcmul_(self.params, eta, scale, reach)
        else:
            shift = reach * math.sqrt(self.count) * inverse_root(norm * norm)
            torch._foreach_addcmul_(self.params, white, scale, shift)

    def _end(self) -> None:
        for state in self.states:
            for name in ("center", "last_gradient", "direction", "image"):
                del state[name]

    def _column(self, name: str) -> list[Tensor]:
        return [state[name] for state in self.states]


def scale_of(curvature: Tensor) -> Tensor:
    """Return the scales of weights with these curvatures, each of which is shrunk towards their mean."""
    if curvature.device.type != "cpu":  # without a look at it
        shared = curvature.mean().clamp_min_(1e-12)
        return curvature.mul_(1 - _SHRINKAGE).add_(shared, alpha=_SHRINKAGE).rsqrt_()
    mean = float(curvature.mean())
    return curvature.mul_(1 - _SHRINKAGE).add_(_SHRINKAGE * max(mean, 1e-12)).rsqrt_()


def curvature_of(weight: Tensor, gradient: Tensor) -> float:
    """Return the precision of a Gaussian prior with this gradient of its log-density, on average.

    Example:
        >>> import torch
        >>> from torchbayes.optim.survey import curvature_of
        >>> w = torch.tensor([1.0, -2.0])
        >>> curvature_of(w, -3 * w)
        3.0
    """
    square = float(weight.detach().square().sum())
    return float((weight.detach() * gradient).abs().sum()) / square if square > 0 else 1.0


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the inner product of two lists of tensors."""
    return float(inner(a, b))


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two lists of tensors, unread."""
    products = (torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(a, b, strict=True))
    return sum(products, torch.zeros((), dtype=a[0].dtype, device=a[0].device))


def inverse_root(square: float) -> float:
    """Return 1/√x, and a large number for 0."""
    return 1 / math.sqrt(max(square, 1e-30))
