"""Stochastic weight averaging as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.average.swa import SWA
from torchbayes.likelihood import Likelihood
from torchbayes.train.averaging import AveragingMethod
from torchbayes.train.method import Plan, register
from torchbayes.train.methods.map import point_optimizer

__all__ = ["SwaMethod"]


@register
class SwaMethod(AveragingMethod):
    """Stochastic weight averaging: the mean of the last part of an ordinary training.

    Args:
        lr: The learning rate before averaging, on the run's schedule.
        optimizer: `adam` or `sgd`.
        momentum: SGD's momentum.
        prior_precision: The precision δ of the prior N(0, 1/δ): `weight_decay = δ / train_size`.
        start: The share of the epochs before averaging begins.
        cycles: The learning-rate cycles while averaging, each ending in a snapshot; for one snapshot per
            epoch give the number of epochs that are left.
        low: What the learning rate falls to in a cycle, as a fraction of it; 1 keeps it constant.
        swa_lr: The learning rate while averaging; `lr` if not given.
    """

    name = "swa"
    family = "one network"
    posterior_kind = "Point"
    summary = "one network, the mean of the weights along the end of the training"
    paper = "Izmailov et al. 2018; what the HWA paper starts from"

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
    ) -> None:
        super().__init__(model, likelihood, plan)
        if not prior_precision >= 0:
            raise ValueError(
                f"prior_precision is {prior_precision:g}: expected a number of at least 0"
            )
        self.average_from(plan, start, cycles, low, swa_lr)
        decay = prior_precision / plan.train_size
        self.set_optimizer(point_optimizer(model, optimizer, lr, momentum, decay))
        self.averager = SWA(model)
