"""The dynamics that ATMC and SGNHT share: momentum under friction, noise and a thermostat.

J. Heek and N. Kalchbrenner, Bayesian Inference for Large Scale Image Classification, 2019, sections 2 and 3.

One update is the momentum's Ornstein-Uhlenbeck process over the time h, solved exactly (Eq. 10), and then
the motion of weights and thermostats (Eq. 9). Two half steps of Eq. (8) are fused, as in Algorithm 1.

Where the paper is wrong and this is not: Eq. (10) must have e^(−βh), not e^(+βh), and a factor m under its
root. With the momentum energy of Eq. (5) the friction is β·m/M(p) and the thermostat moves by
m p²/M² − m³/M³, which Eqs. (1) to (3) give and which p²/m − 1 is the limit of for c → ∞.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "TINY",
    "drift",
    "is_relativistic",
    "momentum_update",
    "slow_friction",
    "steady_momentum_update",
]

TINY = 1e-20
"""A friction in place of 0: (1 − e^(−βh))/β is then its limit h to the last bit, and not 0/0."""


def is_relativistic(c: float) -> bool:
    """Whether there is a speed limit; without one the momentum is Gaussian."""
    return not math.isinf(c)


def _slowness(p: Tensor, out: Tensor, *, m: float, c: float) -> Tensor:
    """m/M(p) of Eq. (6): 1 for a slow weight, towards 0 for one near the speed limit."""
    return torch.addcmul(p.new_ones(()), p, p, value=(m * c) ** -2, out=out).rsqrt_()


def slow_friction(beta: Tensor, p: Tensor, out: Tensor, *, m: float, c: float) -> Tensor:
    """β·m/M(p), in place in `beta`; β itself if there is no speed limit."""
    return beta.mul_(_slowness(p, out, m=m, c=c)) if is_relativistic(c) else beta


def momentum_update(
    theta: Tensor, p: Tensor, grad: Tensor, eta: Tensor, minus_alpha: Tensor | float,
    beta: Tensor, out: Tensor, *, h: float, m: float, n: float, delta: float,
) -> None:  # fmt: skip
    """The momentum after a time h, in place; `beta` and `out` are used up. ∇U is n·grad + δθ.

    p ← e^(−βh) p − (1−e^(−βh))/β ∇U + √(αm(1−e^(−2βh))/β) η

    Every pass over memory counts here. With one α for all weights, `beta` is −β: what is under the root is
    then positive as it is, and α goes outside.
    """
    one = not isinstance(minus_alpha, Tensor)
    decay = torch.mul(beta, h if one else -h, out=out).expm1_()  # e^(−βh) − 1
    gain = torch.div(decay, beta, out=beta)  # ∓(1 − e^(−βh))/β
    sign = -1.0 if one else 1.0
    p.addcmul_(decay, p).addcmul_(gain, grad, value=sign * n)
    if delta != 0:
        p.addcmul_(gain, theta, value=sign * delta)
    # ∓(1 − e^(−2βh))/(2β), because 1 − e^(−2βh) is −decay (2 + decay)
    spread = gain.addcmul_(gain, decay, value=0.5)
    scale = 2 * m
    if isinstance(minus_alpha, Tensor):
        spread.mul_(minus_alpha)
    else:
        scale *= -minus_alpha
    p.addcmul_(spread.sqrt_(), eta, value=math.sqrt(scale))  # Eqs. (10) and (11)


def steady_momentum_update(
    theta: Tensor, p: Tensor, grad: Tensor, eta: Tensor, alpha: Tensor | float, beta: float,
    *, h: float, m: float, n: float, delta: float,
) -> None:  # fmt: skip
    """`momentum_update` where all weights have one friction; uses up a tensor `alpha`."""
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


def drift(
    theta: Tensor, p: Tensor, xi: Tensor | None, work: Sequence[Tensor],
    *, h: float, m: float, c: float,
) -> None:  # fmt: skip
    """θ ← θ + h p/M and ξ ← ξ + h (m p²/M² − m³/M³), in place; without ξ only the weights."""
    velocity = p
    if is_relativistic(c):
        slowness = _slowness(p, work[0], m=m, c=c)
        velocity = torch.mul(p, slowness, out=work[1])
    theta.add_(velocity, alpha=h / m)
    if xi is None:
        return
    xi.addcmul_(velocity, velocity, value=h / m)
    if is_relativistic(c):
        xi.addcmul_(torch.mul(slowness, slowness, out=work[2]), slowness, value=-h)
    else:
        xi.sub_(h)  # Eq. (9)
