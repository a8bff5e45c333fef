"""K-FAC: Kronecker-factored approximate curvature, Noisy K-FAC without the noise.

J. Martens and R. Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature, ICML 2015;
R. Grosse and J. Martens, A Kronecker-factored approximate Fisher matrix for convolution layers, ICML 2016.
The table of symbols is that of Noisy K-FAC. The curvature is the empirical Fisher matrix.
"""

from __future__ import annotations

import torch
from torch import nn

from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.optim.noisy_kfac import NoisyKFAC
from torchbayes.prior import Prior

__all__ = ["KFAC"]


@register(
    "kfac", family="one network", posterior="Point",
    summary="one network, trained by natural gradients with a Kronecker product per layer",
    paper="Martens & Grosse 2015; the baseline of the VOGN paper",
)  # fmt: skip
class KFAC(NoisyKFAC):
    """K-FAC: natural-gradient descent with a Kronecker product per layer. The result is one network.

    It has the arguments of `NoisyKFAC` except those of the noise.

    Args:
        model: The network.
        lr: Learning rate α, as for `NoisyKFAC`.
        train_size: Number N of training examples.
        steps: Number of updates that are planned, as for `NoisyKFAC`.
        prior: Gaussian prior, as for `VOGN`.
        damping: Damping γ, added to the curvature, as for `NoisyKFAC`.
        betas: Decay β1 of the momentum and weight β2 of the *new* factors.
        refresh_every: Maximum number of steps between inversions of a layer's factors; they are inverted at
            once when the layer's curvature is seen to have doubled.
        statistics_every: Maximum number of steps between batches that are averaged into a layer's factors, as
            for `NoisyKFAC`.
        momentum_correction: When a scheduler lowers the rate, scale the momentum by the same factor.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.

    Example:
        >>> import torch, torchbayes as tb
        >>> model, x = torch.nn.Linear(2, 1), torch.randn(8, 2)
        >>> optimizer = tb.KFAC(model, train_size=100)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> bool(optimizer.step(closure) > closure())   # at the mean weights, without noise
        True
    """

    random = False

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int,
        steps: int | None = None, prior: Prior | float = 1.0, damping: float | None = None,
        betas: tuple[float, float] = (0.9, 0.1), refresh_every: int = 10, statistics_every: int = 1,
        momentum_correction: bool = False, params: Params | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, lr, train_size=train_size, steps=steps, prior=prior, temperature_steps=0, damping=damping,
            betas=betas, refresh_every=refresh_every, statistics_every=statistics_every,
            momentum_correction=momentum_correction, params=params, generator=torch.Generator(),
        )  # fmt: skip
