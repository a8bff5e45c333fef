"""OGN: online Gauss-Newton, VOGN without the noise.

K. Osawa et al., Practical Deep Learning with Bayesian Principles, NeurIPS 2019: Algorithm 1 with w = μ. The
table of symbols is VOGN's.
"""

from __future__ import annotations

import torch
from torch import nn

from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.optim.vogn import VOGN
from torchbayes.prior import Prior

__all__ = ["OGN"]


@register(
    "ogn", family="one network", posterior="Point",
    summary="one network, trained by natural gradients from per-example squares",
    paper="Osawa et al. 2019",
)  # fmt: skip
class OGN(VOGN):
    """Online Gauss-Newton: VOGN's update at the mean weights. The result is one network.

    It has the arguments of `VOGN` except those of the noise.

    Args:
        model: The network.
        lr: Learning rate α, as for `VOGN`.
        train_size: Number N of training examples.
        steps: Number of updates that are planned, as for `VOGN`.
        prior: Gaussian prior, as for `VOGN`.
        damping: Damping γ, added to the curvature for a given `lr`; 150/(ρ·`train_size`) if None.
        betas: Decay β1 of the momentum and weight β2 of the *new* curvature.
        augmentation: Factor ρ by which data augmentation enlarges the training set.
        momentum_correction: When a scheduler lowers the rate, scale the momentum by the same factor.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = tb.OGN(model, train_size=100)
        >>> with optimizer.sampled():   # no draw: the mean weights stay
        ...     model(torch.randn(8, 2)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.posterior()
        Point(3 weights of Linear)
    """

    random = False

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int,
        steps: int | None = None, prior: Prior | float = 1.0,
        damping: float | None = None, betas: tuple[float, float] = (0.9, 0.1),
        augmentation: float = 1.0, momentum_correction: bool = False,
        params: Params | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, lr, train_size=train_size, steps=steps, prior=prior, temperature_steps=0, damping=damping,
            betas=betas, augmentation=augmentation, momentum_correction=momentum_correction,
            # Never drawn from; the default would consume a number of torch's generator for its seed.
            params=params, generator=torch.Generator(),
        )  # fmt: skip
