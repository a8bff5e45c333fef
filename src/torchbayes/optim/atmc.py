"""ATMC: the adaptive thermostat Monte Carlo sampler.

J. Heek and N. Kalchbrenner, Bayesian Inference for Large Scale Image Classification, 2019, Algorithm 1.

| symbol | argument | where |
| --- | --- | --- |
| h | `lr` | Eq. (9) |
| m | `mass`, or h/√m = `average_step` | Eqs. (4), (6) |
| c | `speed_limit`, or h·c = `max_step`; infinite for a Gaussian momentum | Eqs. (5), (6) |
| D | `friction`, or e^(−Dh) = `momentum` | section 2.4 |
| p | `state[p]["momentum"]` | Eq. (4) |
| ξ | `state[p]["thermostat"]` | Eq. (4) |

The deviations from the paper are corrections; `torchbayes.optim.thermostat` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchbayes.optim.thermostat as dynamics
from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.optim.base import check_number
from torchbayes.optim.momentum import friction_of, mass_of, speed_limit_of
from torchbayes.optim.sampler import Sampler
from torchbayes.optim.survey import Measured
from torchbayes.optim.warmup import PlannedRun, momentum_step
from torchbayes.prior import Prior

# The time step of a sampler that tunes itself: thermostats react within some hundred updates.
_LR = 0.03

__all__ = ["ATMC", "atmc_update"]


def atmc_update(
    theta: Tensor, p: Tensor, xi: Tensor, grad: Tensor, eta: Tensor,
    *, h: float, m: float, c: float, d: float, n: float, delta: float,
) -> None:  # fmt: skip
    """Run one iteration of Algorithm 1, in place in θ, p and ξ; ∇U is n·grad + δθ."""
    if not dynamics.is_relativistic(c) and float(xi.max()) <= d:
        # No thermostat exceeds D: all weights have the friction D and share one number e^(−Dh).
        alpha = torch.sub(xi.new_tensor(d), xi)  # line 7
        # Lines 8 to 10.
        dynamics.steady_momentum_update(theta, p, grad, eta, alpha, d, h=h, m=m, n=n, delta=delta)
    else:
        beta = torch.clamp_min(xi, d)  # line 8: β = α + ξ = max(D, ξ)
        alpha = torch.sub(beta, xi)  # line 7: α = max(D − ξ, 0) = β − ξ
        y = dynamics.friction_in_a_step(beta, p, h=h, m=m, c=c)
        # Lines 9 and 10.
        dynamics.momentum_update(theta, p, grad, eta, alpha, y, h=h, m=m, n=n, delta=delta)
    dynamics.drift(theta, p, xi, h=h, m=m, c=c)  # lines 11 and 12


@register(
    "atmc", family="a chain's samples", posterior="Samples", target="posterior",
    summary="samples of the weights by momentum with thermostats that adapt the noise",
    paper="Heek & Kalchbrenner 2019, Bayesian Inference for Large Scale Image Classification",
)  # fmt: skip
class ATMC(Sampler):
    """Adaptive thermostat Monte Carlo: sample a posterior with noisy gradients at the cost of SGD.

    Every weight has a thermostat that measures how much noise the gradient already contributes; only the
    rest is added. The friction never falls below D. Thermostats react within about 0.1 / lr² updates
    (with `momentum` 0.9).

    Replace the optimiser line of a training loop, and keep snapshots after a burn-in:

        sampler = tb.ATMC(model, lr=1e-3, train_size=len(train_set))
        samples = tb.Samples(model)
        …                            # loss.backward(); sampler.step(), as usual
        samples.append()             # occasionally, ideally at the end of a learning-rate cycle

    The loss is the *mean* over the batch. The sampler resembles SGD with momentum and learning rate
    `average_step² · train_size`. The paper uses `lr=0.001, average_step=0.0003, max_step=0.001,
    momentum=0.9` for CIFAR-10 and the same with `lr=0.0005` for ImageNet.

    With no step given, the sampler tunes itself: it descends with Adam, measures the scale of every weight
    and the gradient's noise, and then runs its paper's algorithm, unchanged, in coordinates scaled by them.
    `warmup` is the number of updates before the first sample. With a step, mass or friction given, it is the
    paper's from the first update on.

    Args:
        model: The network. Batch norm in it logs a warning (logger `torchbayes`).
        lr: Time step h, which with `average_step` given sets how fast the thermostats react, and whose
            schedule scales the steps; if None 0.01, or 0.03 if the sampler tunes itself.
        train_size: Number of training examples.
        prior: Prior of the weights: the precision δ of N(0, 1/δ), or a `Prior`.
        temperature: Divisor T of the log-likelihood; the prior is not tempered, as in VOGN. If None, it is 1,
            but a sampler that tunes itself and has D > 4N weights for N examples divides the whole
            log-posterior by T = (4N/D)², no less than 0.001: the exact posterior of such a network predicts
            badly (`torchbayes.optim.cold`).
        average_step: Typical change h/√m of a weight per update, at the initial `lr`;
            √(0.05/`train_size`) if None.
        max_step: Largest change h·c of a weight per update, at the initial `lr`; 10/3 of the average if None,
            `inf` for a Gaussian momentum.
        momentum: Largest share e^(−Dh) of the momentum that an update keeps, at the initial `lr`; 0.9 if
            None.
        mass: Mass m, an alternative to `average_step`.
        speed_limit: Speed limit c, an alternative to `max_step`.
        friction: Friction D, an alternative to `momentum`.
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
        >>> sampler = tb.ATMC(model, lr=1e-3, train_size=50_000, average_step=3e-4, max_step=1e-3)
        >>> group = sampler.param_groups[0]
        >>> round(group["mass"], 2), round(group["speed_limit"], 2), round(group["friction"], 1)
        (11.11, 1.0, 105.4)
        >>> model(torch.ones(10, 3)).square().mean().backward()
        >>> sampler.step()
    """

    buffers = ("momentum", "thermostat")
    update = staticmethod(atmc_update)

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int, prior: Prior | float = 1.0,
        temperature: float | None = None, average_step: float | None = None, max_step: float | None = None,
        momentum: float | None = None, mass: float | None = None, speed_limit: float | None = None,
        friction: float | None = None, params: Params | None = None,
        steps: int | None = None, batch_size: int | None = None,
        burn_in: float | None = None, generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        given = (lr, average_step, max_step, momentum, mass, speed_limit, friction)
        run = PlannedRun(steps, batch_size, burn_in) if all(o is None for o in given) else None
        lr = (1e-2 if run is None else _LR) if lr is None else lr
        check_number("lr", lr, above=True)
        m = mass_of(lr, average_step, mass, train_size)
        c = speed_limit_of(lr, m, max_step, speed_limit, 10 / 3)
        d = friction_of(lr, momentum, friction, exact=True)
        super().__init__(
            model, lr, train_size=train_size, prior=prior, temperature=temperature, params=params,
            generator=generator, settings={"mass": m, "speed_limit": c, "friction": d},
            run=run,
        )  # fmt: skip

    def settle(self, group: dict[str, Any], params: Sequence[Tensor], found: Measured) -> float:
        """Choose step and friction."""
        h, m = float(self.defaults["lr"]), float(group["mass"])
        s, f, group["boost"] = momentum_step(found)
        group["friction"] = f / h
        group["held"] = s * s * found.noise / 2 / h
        return s * math.sqrt(m) / h

    def hold(self, group: dict[str, Any], params: Sequence[Tensor], boost: float) -> None:
        """Hold the thermostats at the value of the measured noise."""
        if "thermostat" in group:
            group["thermostat"] = group["held"] * boost
            return
        for p in params:
            self.state[p]["thermostat"].fill_(group["held"] * boost)

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return h, m, c and D of Algorithm 1."""
        return dynamics.thermostat_scalars(group)
