"""SGHMC: stochastic gradient Hamiltonian Monte Carlo.

T. Chen, E. Fox and C. Guestrin, Stochastic Gradient Hamiltonian Monte Carlo, ICML 2014.

| symbol | argument | where |
| --- | --- | --- |
| ε | `lr` (h below) | Eq. (13) |
| M | `mass` (m below) | Eq. (13) |
| C M⁻¹ | `friction` (D below) | Eq. (13) |
| η = ε²M⁻¹ | `average_step`² | Eq. (15) |
| 1 − α = 1 − εCM⁻¹ | `momentum` | Eq. (15) |
| V̂, β̂ = ηV̂/2 | `gradient_variance` | Eq. (15) |
| r | `state[p]["momentum"]` (p below); v = εM⁻¹r | Eqs. (13), (15) |

Deviations from the paper: the momentum is updated before the weights, so that a step needs one gradient;
and, as in the paper's experiments, it is not resampled periodically.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.optim.base import check_number
from torchbayes.optim.momentum import friction_of, mass_of
from torchbayes.optim.sampler import Sampler
from torchbayes.optim.survey import Measured
from torchbayes.optim.warmup import PlannedRun, momentum_step
from torchbayes.prior import Prior

__all__ = ["SGHMC", "sghmc_update"]


def sghmc_update(
    theta: Tensor, p: Tensor, grad: Tensor, eta: Tensor,
    *, h: float, m: float, d: float, variance: float, n: float, delta: float,
) -> None:  # fmt: skip
    """Apply p ← (1 − hD)p − h∇U + N(0, 2hDm − h²V̂); θ ← θ + h p/m, in place in θ and p.

    ∇U is n·grad + δθ.
    """
    p.mul_(1 - h * d).add_(grad, alpha=-h * n).add_(theta, alpha=-h * delta)
    p.add_(eta, alpha=math.sqrt(2 * h * d * m - h**2 * variance))
    theta.add_(p, alpha=h / m)  # Eq. (13)


@register(
    "sghmc", family="a chain's samples", posterior="Samples", target="posterior",
    summary="samples of the weights by gradient descent with momentum and noise",
    paper="Chen et al. 2014",
)  # fmt: skip
class SGHMC(Sampler):
    """Stochastic gradient Hamiltonian Monte Carlo: SGD with momentum and noise.

    It resembles SGD with momentum and learning rate `average_step² · train_size` on the mean loss. The
    gradient's own noise widens the spread unless its variance is known and given; `SGNHT` and `ATMC`
    estimate it.

    With no step given, the sampler tunes itself: it descends with Adam, measures the scale of every weight
    and the gradient's noise, and then runs its paper's algorithm, unchanged, in coordinates scaled by them.
    `warmup` is the number of updates before the first sample. With a step, mass or friction given, it is the
    paper's from the first update on.

    Args:
        model: The network. Batch norm in it logs a warning (logger `torchbayes`).
        lr: Time step h; 0.01 if None. With `average_step` given, it matters only under a schedule.
        train_size: Number of training examples.
        prior: Prior of the weights: the precision δ of N(0, 1/δ), or a `Prior`.
        temperature: Divisor T of the log-likelihood; the prior is not tempered, as in VOGN. If None, it is 1,
            but a sampler that tunes itself and has D > 4N weights for N examples divides the whole
            log-posterior by T = (4N/D)², no less than 0.001: the exact posterior of such a network predicts
            badly (`torchbayes.optim.cold`).
        average_step: Typical change h/√m of a weight per update, at the initial `lr`;
            √(0.05/`train_size`) if None.
        momentum: Share 1 − hD of the momentum that an update keeps, at the initial `lr`; 0.9 if None.
        mass: Mass m, an alternative to `average_step`.
        friction: Friction D, an alternative to `momentum`.
        gradient_variance: Variance V̂ of `train_size` times the gradient of a batch; the added noise is
            reduced by it.
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
        >>> sampler = tb.SGHMC(model, train_size=10, average_step=0.01, momentum=0.9)
        >>> model(torch.ones(10, 3)).square().mean().backward()
        >>> sampler.step()
        >>> sampler.state[model.bias]["momentum"].shape
        torch.Size([1])
    """

    buffers = ("momentum",)
    update = staticmethod(sghmc_update)

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int, prior: Prior | float = 1.0,
        temperature: float | None = None, average_step: float | None = None, momentum: float | None = None,
        mass: float | None = None, friction: float | None = None, gradient_variance: float = 0.0,
        params: Params | None = None,
        steps: int | None = None, batch_size: int | None = None,
        burn_in: float | None = None, generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        given = (lr, average_step, momentum, mass, friction)
        run = PlannedRun(steps, batch_size, burn_in) if all(o is None for o in given) else None
        lr = 1e-2 if lr is None else lr
        check_number("lr", lr, above=True)
        check_number("gradient_variance", gradient_variance)
        settings = {
            "mass": mass_of(lr, average_step, mass, train_size),
            "friction": friction_of(lr, momentum, friction, exact=False),
            "gradient_variance": gradient_variance,
        }
        self.check({"lr": lr, **settings})
        super().__init__(
            model, lr, train_size=train_size, prior=prior, temperature=temperature, params=params,
            generator=generator, settings=settings, run=run,
        )  # fmt: skip

    def check(self, group: dict[str, Any]) -> None:
        """Raise a `ValueError` if the friction hD exceeds 1 or the gradient's noise that of the friction."""
        lost = group["lr"] * group["friction"]
        if lost > 1:
            raise ValueError(
                f"lr {group['lr']:g} times friction {group['friction']:g} is {lost:g}, so a step removes "
                "more than all of the momentum: use a smaller lr or friction"
            )
        needed = group["lr"] * group["gradient_variance"]
        if needed > 2 * group["friction"] * group["mass"]:
            raise ValueError(
                f"gradient_variance is {group['gradient_variance']:g}, more noise than the friction "
                f"{group['friction']:g} can remove at lr {group['lr']:g}: use a smaller lr or more friction"
            )

    def settle(self, group: dict[str, Any], params: Sequence[Tensor], found: Measured) -> float:
        """Choose step and friction."""
        h, m = float(self.defaults["lr"]), float(group["mass"])
        s, f, group["boost"] = momentum_step(found)
        ratio = s * math.sqrt(m) / h
        group["friction"] = f / h
        group["gradient_variance"] = ratio**2 * found.noise
        group["boost"] = min(group["boost"], max(1.0, 0.7 / f))  # f is a share of the momentum
        return ratio

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return h, m, D and V̂ of Eq. (13)."""
        return {
            "h": group["lr"], "m": group["mass"], "d": group["friction"],
            "variance": group["gradient_variance"],
        }  # fmt: skip
