"""PSGLD: Langevin dynamics with the RMSprop preconditioner.

C. Li et al., Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural Networks, AAAI 2016.

| symbol | argument | where |
| --- | --- | --- |
| ε | `lr` | Algorithm 1 |
| α | `decay` | Algorithm 1 |
| λ | `damping` | Algorithm 1 |
| V | `state[p]["square"]` | Algorithm 1 |

Deviations from the paper: V averages the squares of ∇U/N including the prior, so that a weight without a
likelihood gradient keeps a finite preconditioner; and V is divided by 1 − αᵗ, as in Adam, so that the first
steps are not 1/√(1 − α) times too long. As in the paper, Γ is omitted because it needs second derivatives:
the samples are exact only in the limit of a slow average, α → 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.optim.base import check_number, check_train_size
from torchbayes.optim.sampler import Sampler
from torchbayes.optim.survey import Measured
from torchbayes.optim.warmup import PlannedRun, langevin_step
from torchbayes.prior import Prior

__all__ = ["PSGLD", "psgld_update"]


def psgld_update(
    theta: Tensor, v: Tensor, grad: Tensor, eta: Tensor,
    *, epsilon: float, alpha: float, lam: float, n: float, delta: float, size: int, t: int,
) -> None:  # fmt: skip
    """Apply V ← αV + (1−α)(∇U/N)²; G = 1/(λ + √V); θ ← θ − ε/2 G∇U + √(εG) η, in place in θ and V.

    ∇U is n·grad + δθ, and N is `size`.
    """
    force = torch.mul(grad, n).add_(theta, alpha=delta)
    v.mul_(alpha).addcmul_(force, force, value=(1 - alpha) / size**2)
    g = torch.mul(v, 1 / -math.expm1(t * math.log(alpha)))
    g.sqrt_().add_(lam).reciprocal_()
    theta.addcmul_(g, force, value=-epsilon / 2)
    theta.addcmul_(g.sqrt_(), eta, value=math.sqrt(epsilon))


@register(
    "psgld", family="a chain's samples", posterior="Samples", target="posterior",
    summary="samples of the weights by RMSprop with noise",
    paper="Li et al. 2016",
)  # fmt: skip
class PSGLD(Sampler):
    """Preconditioned SGLD: every weight has its own step size, as in RMSprop.

    One step is a step of RMSprop with learning rate `lr · train_size / 2`, plus noise.

    With no step given, the sampler tunes itself: it descends with Adam, measures the scale of every weight
    and the gradient's noise, and then runs its paper's algorithm, unchanged, in coordinates scaled by them.
    `warmup` is the number of updates before the first sample. With `lr` given, it is the
    paper's from the first update on.

    Args:
        model: The network. Batch norm in it logs a warning (logger `torchbayes`).
        lr: Step size ε; if None, the sampler tunes itself, and `lr` is then a step of 0.006/`train_size` in
            coordinates that make it a right one.
        train_size: Number N of training examples.
        prior: Prior of the weights: the precision δ of N(0, 1/δ), or a `Prior`.
        temperature: Divisor T of the log-likelihood; the prior is not tempered, as in VOGN. If None, it is 1,
            but a sampler that tunes itself and has D > 4N weights for N examples divides the whole
            log-posterior by T = (4N/D)², no less than 0.001: the exact posterior of such a network predicts
            badly (`torchbayes.optim.cold`).
        decay: Weight α of the old value in the average V of squared gradients.
        damping: Constant λ added to √V: the largest preconditioner is 1/λ.
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
        >>> sampler = tb.PSGLD(model, lr=1e-4, train_size=10)
        >>> model(torch.ones(10, 3)).square().mean().backward()
        >>> sampler.step()
        >>> sampler.state[model.bias]["step"]
        1
    """

    buffers = ("square",)
    update = staticmethod(psgld_update)

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int,
        prior: Prior | float = 1.0, temperature: float | None = None, decay: float = 0.99,
        damping: float = 1e-5, params: Params | None = None,
        steps: int | None = None, batch_size: int | None = None, burn_in: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        check_number("damping", damping, above=True)
        if not 0 < decay < 1:
            raise ValueError(
                f"decay is {decay:g}: expected the weight of the old value, between 0 and 1"
            )
        super().__init__(
            model, 0.006 / check_train_size(train_size) if lr is None else lr,
            train_size=train_size, prior=prior, temperature=temperature, params=params,
            generator=generator, settings={"decay": decay, "damping": damping},
            run=PlannedRun(steps, batch_size, burn_in) if lr is None else None,
        )  # fmt: skip

    def settle(self, group: dict[str, Any], params: Sequence[Tensor], found: Measured) -> float:
        """Choose ε; in coordinates of curvature 1, √V is √(1 + ν)/N."""
        epsilon, group["boost"] = langevin_step(found)
        root = math.sqrt(1 + found.noise) / int(group["train_size"])
        # With the scale r, V has the factor r⁠²: the step in θ is ε r²/(r √V).
        factor = epsilon * root / float(self.defaults["lr"])
        for p in params:
            self.state[p]["square"].fill_((factor * root) ** 2)
        return factor

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return ε, α, λ, N and t of Algorithm 1."""
        return {
            "epsilon": group["lr"], "alpha": group["decay"], "lam": group["damping"],
            "size": group["train_size"], "t": step,
        }  # fmt: skip
