"""The dynamics of ATMC and SGNHT: momentum under friction, noise and a thermostat.

J. Heek and N. Kalchbrenner, Bayesian Inference for Large Scale Image Classification, 2019, sections 2 and 3.

One update is the momentum's Ornstein-Uhlenbeck process over the time h, solved exactly (Eq. 10), and then
the motion of weights and thermostats (Eq. 9). Two half steps of Eq. (8) are fused, as in Algorithm 1.

Corrections of the paper: Eq. (10) must have e^(−βh), not e^(+βh), and a factor m under its root. With the
momentum energy of Eq. (5) the friction is β·m/M(p) and the thermostat moves by m p²/M² − m³/M³, which
follows from Eqs. (1) to (3) and has the limit p²/m − 1 for c → ∞.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "drift",
    "friction_in_a_step",
    "is_relativistic",
    "momentum_update",
    "steady_momentum_update",
    "thermostat_scalars",
]

# Replaces a friction of 0, so that t/y is its limit 1 and not 0/0; next to any other value it rounds away.
_TINY = 1e-20


def is_relativistic(c: float) -> bool:
    """Whether there is a speed limit; without one the momentum is Gaussian."""
    return not math.isinf(c)


def _root(p: Tensor, *, m: float, c: float) -> Tensor:
    """Return M(p)/m of Eq. (6): 1 for a slow weight, large for one near the speed limit."""
    return torch.addcmul(p.new_ones(()), p, p, value=(m * c) ** -2).sqrt_()


def friction_in_a_step(beta: Tensor, p: Tensor, *, h: float, m: float, c: float) -> Tensor:
    """Compute βh/2 in place in `beta`; with a speed limit the friction is β·m/M(p)."""
    if not is_relativistic(c):
        return beta.mul_(h / 2)
    return torch.addcdiv(p.new_zeros(()), beta, _root(p, m=m, c=c), value=h / 2, out=beta)


def momentum_update(
    theta: Tensor, p: Tensor, grad: Tensor, eta: Tensor, alpha: Tensor | float,
    y: Tensor, *, h: float, m: float, n: float, delta: float,
) -> None:  # fmt: skip
    """Advance the momentum by a time h, in place; `y` is βh/2 and is overwritten. ∇U is n·grad + δθ.

    p ← e^(−βh) p − (1−e^(−βh))/β ∇U + √(αm(1−e^(−2βh))/β) η

    Every pass over memory counts here. With t = tanh(βh/2) the three factors are (1−t)/(1+t),
    h (t/y)/(1+t) and √(2αmh (t/y)/(1+t)²): as accurate as expm1 where βh is small, in half the time.
    """
    y.add_(_TINY)
    t = torch.tanh(y)
    gain = torch.div(t, y, out=y)
    below = torch.add(t, 1)
    p.addcmul_(t.div_(below), p, value=-2)
    gain.div_(below)
    p.addcmul_(gain, grad, value=-h * n)
    if delta != 0:
        p.addcmul_(gain, theta, value=-h * delta)
    spread, scale = gain.div_(below), 2 * m * h
    if isinstance(alpha, Tensor):
        spread.mul_(alpha)
    else:
        scale *= alpha
    p.addcmul_(spread.sqrt_(), eta, value=math.sqrt(scale))  # Eqs. (10) and (11)


def steady_momentum_update(
    theta: Tensor, p: Tensor, grad: Tensor, eta: Tensor, alpha: Tensor | float, beta: float,
    *, h: float, m: float, n: float, delta: float,
) -> None:  # fmt: skip
    """Like `momentum_update` with one friction for all weights; overwrites a tensor `alpha`."""
    decay = math.expm1(-beta * h)
    gain = decay / beta if beta != 0 else -h
    p.mul_(1 + decay).add_(grad, alpha=gain * n)
    if delta != 0:
        p.add_(theta, alpha=gain * delta)
    variance = -m * gain * (2 + decay)
    if isinstance(alpha, Tensor):
        p.addcmul_(alpha.mul_(variance).sqrt_(), eta)
    else:
        p.add_(eta, alpha=math.sqrt(alpha * variance))  # Eqs. (10) and (11)


def drift(theta: Tensor, p: Tensor, xi: Tensor | None, *, h: float, m: float, c: float) -> None:
    """Apply θ ← θ + h p/M and ξ ← ξ + h (m p²/M² − m³/M³) in place; without ξ, only the weights move."""
    velocity = p
    if is_relativistic(c):
        root = _root(p, m=m, c=c)
        velocity = torch.div(p, root)
    theta.add_(velocity, alpha=h / m)
    if xi is None:
        return
    xi.addcmul_(velocity, velocity, value=h / m)
    if is_relativistic(c):
        xi.sub_(root.reciprocal_().pow_(3), alpha=h)
    else:
        xi.sub_(h)  # Eq. (9)


def thermostat_scalars(group: dict[str, Any]) -> dict[str, Any]:
    """Return h, m, c and D of a parameter group."""
    return {
        "h": group["lr"], "m": group["mass"], "c": group["speed_limit"], "d": group["friction"]
    }  # fmt: skip
