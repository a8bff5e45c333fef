"""K-FAC: Kronecker-factored approximate curvature, Noisy K-FAC without the noise.

J. Martens and R. Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature, ICML 2015;
R. Grosse and J. Martens, A Kronecker-factored approximate Fisher matrix for convolution layers, ICML 2016.
The table of symbols is that of Noisy K-FAC. The curvature is the empirical Fisher matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchbayes.optim.noisy_kfac import NoisyKFAC
from torchbayes.posterior import Point
from torchbayes.prior import GaussianPrior

__all__ = ["KFAC"]


class KFAC(NoisyKFAC):
    """K-FAC: natural-gradient descent with a Kronecker product per layer. The result is one network.

    Args:
        model: The network.
        lr: The learning rate α.
        train_size: The number of training examples N.
        prior_precision: The precision δ of the prior N(0, 1/δ) of every weight except norm layers'.
        prior: A Gaussian prior of its own for every weight, in place of `prior_precision`.
        damping: γ, added to the curvature.
        betas: The momentum's decay β1 and the weight β2 of the *new* factors.
        refresh_every: The most steps between inversions of a layer's factors; where its curvature has
            doubled they are inverted at once.
        momentum_correction: Where a scheduler lowers the rate, multiply the momentum by the same factor.
        params: Parameters of the model, or groups of them; all trainable ones if None.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = tb.KFAC(model, train_size=100)
        >>> with optimizer.sampled():   # no draw: the mean weights stay
        ...     model(torch.randn(8, 2)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.posterior()
        Point(3 weights of Linear)
    """

    random = False

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        train_size: int,
        prior_precision: float = 1.0,
        prior: GaussianPrior | None = None,
        damping: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.1),
        refresh_every: int = 1,
        momentum_correction: bool = False,
        params: Iterable[Any] | None = None,
    ) -> None:
        super().__init__(
            model,
            lr,
            train_size=train_size,
            prior_precision=prior_precision,
            prior=prior,
            damping=damping,
            betas=betas,
            refresh_every=refresh_every,
            momentum_correction=momentum_correction,
            params=params,
            generator=torch.Generator(),
        )

    def posterior(self) -> Point:
        """The weights, with all mass on them."""
        return Point(self._mean_weights(), model_name=type(self.model).__name__)
