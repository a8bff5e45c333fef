"""W2 of a hypernetwork and its momentum, unit by unit: a unit that is off is not touched.

The gradient of W2 = (w₁ … w_h), a row for each unit, is a·gᵀ, and about half of the hidden units have a = 0.
Such a unit adds nothing to the draw, and its step is known without the data:

    v ← μ v + λ w,    w ← w − α (λ w + μ v)    (Nesterov; else w ← w − α v)

These steps are taken when the unit is on again, one after another while a piece of it is in the cache, or
when anyone uses W2. Every entry goes through the same operations in the same order as if each step had been
taken at its time, so that the result does not depend on when that is.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbayes.core.workspace import Workspace
from torchbayes.variational.pending import Pending, finish, is_plain, made, postpone

__all__ = [
    "HiddenUnits",
    "add_units",
    "coast",
    "fits",
    "four_steps",
    "unit_step",
]

# Units that are added to a draw at once.
_AT_ONCE = 8
# Units of which a step is taken at once.
_TOGETHER = 4
# Steps that a unit may be behind. A step in the cache takes a tenth of one in memory.
_LONGEST = 64


def unit_step(
    w: Tensor, v: Tensor, g: Tensor,
    *, a: float, alpha: float, mu: float, decay: float, nesterov: float,
) -> list[Tensor]:  # fmt: skip
    """Take an SGD step on a unit with the gradient a·g, in place; return w·g from before the step."""
    back = (w * g).sum()
    d = (g * a).add_(w, alpha=decay)
    v.mul_(mu).add_(d)
    w.sub_(d.add_(v, alpha=mu) if nesterov else v, alpha=alpha)
    return [back]


def four_steps(
    w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, v0: Tensor, v1: Tensor, v2: Tensor, v3: Tensor,
    g: Tensor, *, a0: float, a1: float, a2: float, a3: float,
    alpha: float, mu: float, decay: float, nesterov: float,
) -> list[Tensor]:  # fmt: skip
    """Take the `unit_step` of four units, so that g is read once; return their sums."""
    units = zip((w0, w1, w2, w3), (v0, v1, v2, v3), (a0, a1, a2, a3), strict=True)
    settings = {"alpha": alpha, "mu": mu, "decay": decay, "nesterov": nesterov}
    return [unit_step(w, v, g, a=a, **settings)[0] for w, v, a in units]


def coast(w: Tensor, v: Tensor, *, steps: np.ndarray) -> None:
    """Take steps of a unit without a gradient, in place.

    Args:
        w: The unit's column of W2.
        v: Its momentum.
        steps: α, μ, λ and whether it is Nesterov's momentum, a row for each step.
    """
    for alpha, mu, decay, nesterov in steps.reshape(-1, 4).tolist():
        d = w * decay
        v.mul_(mu).add_(d)
        w.sub_(d.add_(v, alpha=mu) if nesterov else v, alpha=alpha)


def add_units(
    total: Tensor, w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor, w5: Tensor, w6: Tensor,
    w7: Tensor, *, a0: float, a1: float, a2: float, a3: float, a4: float, a5: float, a6: float, a7: float,
) -> None:  # fmt: skip
    """Add eight units, each times its activation, in place."""
    values = (a0, a1, a2, a3, a4, a5, a6, a7)
    for w, a in zip((w0, w1, w2, w3, w4, w5, w6, w7), values, strict=True):
        total.add_(w, alpha=a)


def fits(weight: Tensor) -> bool:
    """Whether `HiddenUnits` can update W2; elsewhere reading which units are on would wait for the device."""
    return isinstance(weight, Pending) or (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and is_plain(weight)
    )


class HiddenUnits:
    """Draws from W2 of one generated weight, and its updates, some of which are left for later.

    W2 and its momentum have the shape (h, …). Whoever else uses one of them finds it up to date (`pending`).

    Args:
        space: Where updates are applied.
    """

    def __init__(self, space: Workspace) -> None:
        self._space = space
        # Another thread may use W2 meanwhile.
        self._lock = threading.RLock()
        # Steps that some unit has not taken, the memory to take them in, and how many every unit has taken.
        self._steps: list[tuple[float, float, float, float]] = []
        self._memory: tuple[Tensor, Tensor] | None = None
        self._taken: list[int] = []

    @property
    def behind(self) -> int:
        """Number of units that have not taken all steps."""
        return sum(taken < len(self._steps) for taken in self._taken)

    @torch.no_grad()
    def draw(self, weight: Tensor, activation: Tensor, out: Tensor) -> None:
        """Write W2·a to `out`, reading only units that are on.

        Args:
            weight: W2, for which `fits` holds.
            activation: a, (h,).
            out: The generated weight.
        """
        with self._lock:
            own = self._own(weight)
            values = activation.tolist()
            on = [unit for unit, a in enumerate(values) if a != 0]
            for unit in on:
                self._catch_up(unit)
            out.zero_()
            for start in range(0, len(on), _AT_ONCE):
                units = on[start : start + _AT_ONCE]
                scalars = {f"a{i}": values[unit] for i, unit in enumerate(units)}
                # What is left over has a last unit, times 0.
                scalars |= {f"a{i}": 0.0 for i in range(len(units), _AT_ONCE)}
                units += [units[-1]] * (_AT_ONCE - len(units))
                self._space.apply(add_units, [[out]], [[own[unit]] for unit in units], **scalars)

    @torch.no_grad()
    def step(
        self, weight: Tensor, momentum: Tensor, gradient: Tensor, activation: Tensor,
        *, alpha: float, mu: float, decay: float, nesterov: bool,
    ) -> Tensor:  # fmt: skip
        """Take one SGD step with the gradient a·gᵀ; return W2·g from before it, 0 for units that are off.

        Args:
            weight: W2, for which `fits` holds.
            momentum: Its momentum.
            gradient: g, of the shape of the generated weight.
            activation: a, (h,).
            alpha: Learning rate.
            mu: Decay of the momentum.
            decay: Weight decay.
            nesterov: Whether the momentum is Nesterov's.
        """
        values = activation.tolist()
        back = [0.0] * len(values)
        settings: dict[str, Any] = {
            "alpha": alpha, "mu": mu, "decay": decay, "nesterov": float(nesterov)
        }  # fmt: skip
        on = [unit for unit, a in enumerate(values) if a != 0]
        with self._lock:
            self._memory = memory = self._own(weight), self._own(momentum)
            self._taken = self._taken or [0] * len(values)
            for unit in on:
                self._catch_up(unit)
            while on:
                count = _TOGETHER if len(on) >= _TOGETHER else 1
                units, on = on[:count], on[count:]
                columns = [[tensor[unit]] for tensor in memory for unit in units]
                numbers: dict[str, Any] = {
                    f"a{i}" if count > 1 else "a": values[unit] for i, unit in enumerate(units)
                }
                update = four_steps if count > 1 else unit_step
                sums = self._space.apply(update, columns, [[gradient]], **numbers, **settings)
                assert sums is not None
                for unit, product in zip(units, sums, strict=True):
                    back[unit] = float(product)
                    self._taken[unit] += 1
            self._steps.append((alpha, mu, decay, float(nesterov)))
            if len(self._steps) == _LONGEST or not fits(momentum):
                self._settle()
            else:
                postpone(weight, self)
                postpone(momentum, self)
        return torch.tensor(back, dtype=activation.dtype, device=activation.device)

    def finish(self, tensor: Tensor) -> None:
        """Take all steps before W2 or its momentum is used."""
        with self._lock:
            self._settle()
            made(tensor)

    def _own(self, tensor: Tensor) -> Tensor:
        """Return an ordinary tensor on the memory of W2 or its momentum, whose steps may be pending here."""
        if isinstance(tensor, Pending) and tensor.maker is not self:
            finish(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            own = tensor.data
        if self._memory and all(own.data_ptr() != known.data_ptr() for known in self._memory):
            self._settle()  # these steps are another tensor's
        return own

    @torch.no_grad()
    def _settle(self) -> None:
        """Take all steps that have not been taken."""
        for unit in range(len(self._taken)):
            self._catch_up(unit)
        self._steps, self._taken, self._memory = [], [], None

    def _catch_up(self, unit: int) -> None:
        steps = self._steps[self._taken[unit] :] if self._memory else []
        if self._memory and steps:
            columns = [[tensor[unit]] for tensor in self._memory]
            self._space.apply(coast, columns, [], steps=np.array(steps).reshape(-1))
            self._taken[unit] = len(self._steps)
