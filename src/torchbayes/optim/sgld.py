"""SGLD: stochastic gradient Langevin dynamics.

M. Welling and Y. W. Teh, Bayesian Learning via Stochastic Gradient Langevin Dynamics, ICML 2011.

| symbol | argument | where |
| --- | --- | --- |
| ε | `lr` | Eq. (4) |
| N | `train_size` | Eq. (4) |
| p(θ) | `prior` | Eq. (4) |

Deviations from the paper: none. ∇U below is minus the bracket of Eq. (4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.optim.base import check_train_size
from torchbayes.optim.sampler import Sampler
from torchbayes.optim.survey import Measured
from torchbayes.optim.warmup import PlannedRun, langevin_step
from torchbayes.prior import Prior

__all__ = ["SGLD", "sgld_update"]


def sgld_update(
    theta: Tensor, grad: Tensor, eta: Tensor, *, epsilon: float, n: float, delta: float
) -> None:
    """Apply θ ← θ − ε/2 ∇U + √ε η with ∇U = n·grad + δθ, in place."""
    theta.mul_(1 - epsilon / 2 * delta).add_(grad, alpha=-epsilon / 2 * n)
    theta.add_(eta, alpha=math.sqrt(epsilon))  # Eq. (4)


@register(
    "sgld", family="a chain's samples", posterior="Samples", target="posterior",
    summary="samples of the weights by gradient descent with noise",
    paper="Welling & Teh 2011",
)  # fmt: skip
class SGLD(Sampler):
    """Stochastic gradient Langevin dynamics: gradient descent with exactly the noise that makes it sample.

    One step is a step of plain SGD with learning rate `lr · train_size / 2` on the mean loss, plus noise. The
    gradient's own noise is not corrected for and widens the spread by a factor of about
    1 + lr/4 · (variance of train_size · gradient): use small steps, `SGNHT` or `ATMC`.

    With no step given, the sampler tunes itself: it descends with Adam, measures the scale of every weight
    and the gradient's noise, and then runs its paper's algorithm, unchanged, in coordinates scaled by them.
    `warmup` is the number of updates before the first sample. With `lr` given, it is the
    paper's from the first update on.

    Args:
        model: The network. Batch norm in it logs a warning (logger `torchbayes`).
        lr: Step size ε; if None, the sampler tunes itself, and `lr` is then a step of 0.2/`train_size` in
            coordinates that make it a right one.
        train_size: Number N of training examples.
        prior: Prior of the weights: the precision δ of N(0, 1/δ), or a `Prior`.
        temperature: Divisor T of the log-likelihood; the prior is not tempered, as in VOGN. If None, it is 1,
            but a sampler that tunes itself and has D > 4N weights for N examples divides the whole
            log-posterior by T = (4N/D)², no less than 0.001: the exact posterior of such a network predicts
            badly (`torchbayes.optim.cold`).
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
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> x, y = torch.ones(50, 1), torch.full((50, 1), 2.0)   # posterior N(100/51, 1/51)
        >>> sampler = tb.SGLD(model, lr=2e-3, train_size=50, generator=torch.Generator().manual_seed(0))
        >>> samples = tb.Samples(model)
        >>> for step in range(1000):
        ...     sampler.zero_grad()
        ...     (0.5 * (model(x) - y) ** 2).mean().backward()
        ...     sampler.step()
        ...     if step >= 200:
        ...         samples.append()
        >>> round(samples.mean()["weight"].item(), 1)
        2.0
    """

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int,
        prior: Prior | float = 1.0, temperature: float | None = None, params: Params | None = None,
        steps: int | None = None, batch_size: int | None = None, burn_in: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, 0.2 / check_train_size(train_size) if lr is None else lr, train_size=train_size,
            prior=prior, temperature=temperature, params=params, generator=generator, settings={},
            run=PlannedRun(steps, batch_size, burn_in) if lr is None else None,
        )  # fmt: skip

    update = staticmethod(sgld_update)

    def settle(self, group: dict[str, Any], params: Sequence[Tensor], found: Measured) -> float:
        """Choose ε."""
        epsilon, group["boost"] = langevin_step(found)
        return math.sqrt(epsilon / self.defaults["lr"])

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return ε of Eq. (4)."""
        return {"epsilon": group["lr"]}
