"""SGNHT: stochastic gradient Nosé-Hoover thermostats.

N. Ding et al., Bayesian Sampling Using Stochastic Gradient Thermostats, NIPS 2014, in the notation and
with the integrator of the ATMC paper (Heek and Kalchbrenner 2019), where it is the baseline.

| symbol | argument | where |
| --- | --- | --- |
| h | `lr` | ATMC, Eq. (9) |
| m | `mass`, or h/√m = `average_step` | ATMC, Eqs. (4), (6) |
| c | `speed_limit`, or h·c = `max_step` | ATMC, Eq. (5) |
| D (Ding: A) | `friction`, or e^(−Dh) = `momentum` | ATMC, section 2.4 |
| p | `state[p]["momentum"]` | ATMC, Eq. (4) |
| ξ (Ding: ξ − A) | `state[p]["thermostat"]`, or one number in the group | ATMC, Eq. (4) |

Deviations from Ding et al.: friction and noise are integrated exactly instead of by Euler's rule; by
default every weight has a thermostat, as in the ATMC paper, instead of one for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchbayes.optim.thermostat as dynamics
from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.core.shards import local
from torchbayes.optim.base import check_number
from torchbayes.optim.momentum import friction_of, mass_of, speed_limit_of
from torchbayes.optim.sampler import Sampler
from torchbayes.optim.survey import Measured
from torchbayes.optim.warmup import PlannedRun, momentum_step
from torchbayes.prior import Prior

# The time step of a sampler that tunes itself: thermostats react within some hundred updates.
_LR = 0.03

__all__ = ["SGNHT", "sgnht_update"]


def sgnht_update(
    theta: Tensor, p: Tensor, xi: Tensor, grad: Tensor, eta: Tensor,
    *, h: float, m: float, c: float, d: float, n: float, delta: float,
) -> None:  # fmt: skip
    """Update θ, p and ξ in place, with a thermostat per weight; ∇U is n·grad + δθ."""
    beta = torch.add(xi, d)  # β = D + ξ
    y = dynamics.friction_in_a_step(beta, p, h=h, m=m, c=c)
    # Eq. (10) with α = D.
    dynamics.momentum_update(theta, p, grad, eta, d, y, h=h, m=m, n=n, delta=delta)
    dynamics.drift(theta, p, xi, h=h, m=m, c=c)  # Eq. (9)


def shared_thermostat_update(
    theta: Tensor, p: Tensor, grad: Tensor, eta: Tensor,
    *, h: float, m: float, c: float, d: float, xi: float, n: float, delta: float,
) -> None:  # fmt: skip
    """Update θ and p in place, with one thermostat ξ for all weights; ∇U is n·grad + δθ."""
    dynamics.steady_momentum_update(theta, p, grad, eta, d, d + xi, h=h, m=m, n=n, delta=delta)
    dynamics.drift(theta, p, None, h=h, m=m, c=c)


@register(
    "sgnht", family="a chain's samples", posterior="Samples", target="posterior",
    summary="samples of the weights by momentum with thermostats that take out the gradient's noise",
    paper="Ding et al. 2014; the baseline of the ATMC paper",
)  # fmt: skip
class SGNHT(Sampler):
    """Stochastic gradient Nosé-Hoover thermostats: momentum whose friction adapts to the gradient's noise.

    The friction rises for a weight that is too fast and falls for one that is too slow, which removes
    gradient noise of any constant size without knowing it. The thermostats react within about
    0.1 / lr² updates (with `momentum` 0.9). Friction can become negative; `ATMC` avoids that.

    With no step given, the sampler tunes itself: it descends with Adam, measures the scale of every weight
    and the gradient's noise, and then runs its paper's algorithm, unchanged, in coordinates scaled by them.
    `warmup` is the number of updates before the first sample. With a step, mass or friction given, it is the
    paper's from the first update on.

    Args:
        model: The network. Batch norm in it logs a warning (logger `torchbayes`).
        lr: Time step h, which with `average_step` given sets how fast the thermostats react; if None 0.01,
            or 0.03 if the sampler tunes itself.
        train_size: Number of training examples.
        prior: Prior of the weights: the precision δ of N(0, 1/δ), or a `Prior`.
        temperature: Divisor T of the log-likelihood; the prior is not tempered, as in VOGN. If None, it is 1,
            but a sampler that tunes itself and has D > 4N weights for N examples divides the whole
            log-posterior by T = (4N/D)², no less than 0.001: the exact posterior of such a network predicts
            badly (`torchbayes.optim.cold`).
        average_step: Typical change h/√m of a weight per update, at the initial `lr`;
            √(0.05/`train_size`) if None.
        max_step: Largest change h·c of a weight per update, at the initial `lr`; no limit if None.
        momentum: Share e^(−Dh) of the momentum that an update keeps while ξ = 0, at the initial `lr`; 0.9 if
            None.
        mass: Mass m, an alternative to `average_step`.
        speed_limit: Speed limit c, an alternative to `max_step`.
        friction: Friction D, an alternative to `momentum`.
        per_parameter: Use a thermostat for every weight; if False, one for all weights of a group, as in the
            original, which is faster but removes only noise that all weights have in common.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.
        steps: Number of updates of the whole run, for a sampler that tunes itself; 2,000 if None.
        batch_size: Examples per batch, for the same; 100 if None.
        burn_in: Share of `steps` before the first sample. A sampler that tunes itself spends it on doing so;
            if None, it takes 1,200 updates, but no less than 30 % and no more than 70 % (cold: 80 %) of
            them, to descend, and up to 15 % to come to rest.
        generator: Source of the noise; its state is saved with the sampler's.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(3, 1)
        >>> sampler = tb.SGNHT(model, lr=0.01, train_size=10, per_parameter=False)
        >>> model(torch.ones(10, 3)).square().mean().backward()
        >>> sampler.step()
        >>> sampler.param_groups[0]["thermostat"] != 0
        True
    """

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int, prior: Prior | float = 1.0,
        temperature: float | None = None, average_step: float | None = None, max_step: float | None = None,
        momentum: float | None = None, mass: float | None = None, speed_limit: float | None = None,
        friction: float | None = None, per_parameter: bool = True, params: Params | None = None,
        steps: int | None = None, batch_size: int | None = None,
        burn_in: float | None = None, generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        given = (lr, average_step, max_step, momentum, mass, speed_limit, friction)
        run = PlannedRun(steps, batch_size, burn_in) if all(o is None for o in given) else None
        lr = (1e-2 if run is None else _LR) if lr is None else lr
        check_number("lr", lr, above=True)
        m = mass_of(lr, average_step, mass, train_size)
        c = speed_limit_of(lr, m, max_step, speed_limit, math.inf)
        if not per_parameter and not math.isinf(c):
            raise ValueError(
                f"one thermostat for all weights supports no speed limit, which is {c:g}: omit max_step and "
                "speed_limit, or use a thermostat per parameter"
            )
        self.buffers = ("momentum", "thermostat") if per_parameter else ("momentum",)
        settings = {
            "mass": m, "speed_limit": c,
            "friction": friction_of(lr, momentum, friction, exact=True),
        } | ({} if per_parameter else {"thermostat": 0.0})  # fmt: skip
        super().__init__(
            model, lr, train_size=train_size, prior=prior, temperature=temperature, params=params,
            generator=generator, settings=settings, run=run,
        )  # fmt: skip

    @property
    def update(self) -> Callable[..., None]:
        """The pure function of Eqs. (9) and (10) of the ATMC paper with α = D."""
        return sgnht_update if "thermostat" in self.buffers else shared_thermostat_update

    @property
    def shares_state(self) -> bool:
        """Whether there is one thermostat for all weights."""
        return "thermostat" not in self.buffers

    def settle(self, group: dict[str, Any], params: Sequence[Tensor], found: Measured) -> float:
        """Choose step and friction."""
        h, m = float(self.defaults["lr"]), float(group["mass"])
        s, f, group["boost"] = momentum_step(found)
        noisy = s * s * found.noise / 2
        group["friction"] = (f - noisy) / h
        group["held"] = noisy / h
        return s * math.sqrt(m) / h

    def hold(self, group: dict[str, Any], params: Sequence[Tensor], boost: float) -> None:
        """Hold the thermostats at the value of the measured noise."""
        if "thermostat" in group:
            group["thermostat"] = group["held"] * boost
            return
        for p in params:
            self.state[p]["thermostat"].fill_(group["held"] * boost)

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return h, m, c and D, and ξ if it is shared."""
        shared = {"xi": group["thermostat"]} if "thermostat" in group else {}
        return dynamics.thermostat_scalars(group) | shared

    def end_group(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Update the shared thermostat of a group, if there is one: ξ ← ξ + h (pᵀp/(nm) − 1)."""
        if "thermostat" in group:
            momenta = [local(self.state[p]["momentum"]).flatten() for p in params]
            (squares,) = self._sum([sum(float(torch.dot(p, p)) for p in momenta)])
            count = sum(p.numel() for p in params)
            group["thermostat"] += group["lr"] * (squares / (count * group["mass"]) - 1)
