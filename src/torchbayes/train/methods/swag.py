"""SWA-Gaussian as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.average.swag import SWAG
from torchbayes.likelihood import Likelihood
from torchbayes.train.method import Plan, register
from torchbayes.train.methods.swa import SwaMethod

__all__ = ["SwagMethod"]


@register
class SwagMethod(SwaMethod):
    """SWA-Gaussian: a Gaussian from the spread of the weights at the end of an ordinary training.

    Args:
        lr: The learning rate before averaging, on the run's schedule.
        optimizer: `adam` or `sgd`.
        momentum: SGD's momentum.
        prior_precision: The precision δ of the prior N(0, 1/δ): `weight_decay = δ / train_size`.
        start: The share of the epochs before averaging begins.
        cycles: The learning-rate cycles while averaging, each ending in a snapshot; for one snapshot per
            epoch give the number of epochs that are left.
        low: What the learning rate falls to in a cycle, as a fraction of it; 1 keeps it constant, as in
            the paper.
        swa_lr: The learning rate while averaging, which decides how wide the Gaussian gets; `lr` if not
            given.
        rank: The deviations in the low-rank half of the covariance; 0 gives a diagonal one.
    """

    name = "swag"
    family = "a Gaussian"
    posterior_kind = "LowRankGaussian"
    summary = "a Gaussian with the mean and spread of the weights along the end of the training"
    paper = "Maddox et al. 2019; HWA without a mean field"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 1e-3,
        optimizer: str = "adam",
        momentum: float = 0.9,
        prior_precision: float = 1.0,
        start: float = 0.5,
        cycles: int = 20,
        low: float = 1.0,
        swa_lr: float | None = None,
        rank: int = 20,
    ) -> None:
        super().__init__(
            model,
            likelihood,
            plan,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            prior_precision=prior_precision,
            start=start,
            cycles=cycles,
            low=low,
            swa_lr=swa_lr,
        )
        self.averager = SWAG(model, rank)
