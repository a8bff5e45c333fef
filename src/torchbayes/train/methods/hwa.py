"""Hyperparameter weight averaging as a method: Bayes by Backprop whose cycle ends are averaged."""

from __future__ import annotations

from torch import nn

from torchbayes.average.hwa import HWA
from torchbayes.likelihood import Likelihood
from torchbayes.prior import Prior
from torchbayes.train.averaging import AveragingMethod
from torchbayes.train.method import Plan, register
from torchbayes.train.methods.bbb import BbbMethod

__all__ = ["HwaMethod"]


@register
class HwaMethod(AveragingMethod, BbbMethod):  # type: ignore[misc]  # posterior: may have a low rank
    """HWA: Bayes by Backprop, then its means and variances averaged over learning-rate cycles.

    Args:
        lr: The learning rate of μ and ρ before averaging, on the run's schedule.
        optimizer: `adam` or `sgd` (the paper's).
        momentum: SGD's momentum.
        estimator: `shared_draw`, `flipout` (the paper's) or `local_reparameterisation`.
        prior: `gaussian` (the paper's) or `mixture`; in Python also a prior itself, such as an earlier
            task's posterior (`GaussianPrior.from_posterior`).
        prior_precision: The precision δ of the Gaussian prior N(0, 1/δ).
        pi: The share of the mixture's wide component.
        std1: Its standard deviation.
        std2: The standard deviation of the mixture's narrow component.
        init_std: The standard deviation that the mean field starts from.
        init: `model`, or `moped` to start a trained network with σ = init_std · |w|.
        mc_samples: The draws per update; their losses are averaged.
        kl_schedule: `uniform`, `blundell` or `linear`, as of `bbb`.
        kl_warmup: The share of all updates that the linear rise takes.
        start: The share of the epochs before averaging begins.
        cycles: The learning-rate cycles while averaging, each ending in a snapshot; for one snapshot per
            epoch give the number of epochs that are left.
        low: What the learning rate falls to in a cycle, as a fraction of it (the paper's authors: from
            0.006 to 0.00005); 1 keeps it constant.
        swa_lr: The learning rate while averaging; `lr` if not given.
        rank: The deviations of μ in a low-rank part of the covariance; 0 gives a diagonal one.
    """

    name = "hwa"
    family = "a Gaussian"
    posterior_kind = "Gaussian"
    summary = "Bayes by Backprop, its means and variances averaged along the end of the training"
    paper = "Karimi & Li 2021, HWA: Hyperparameters Weight Averaging in Bayesian Neural Networks"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 1e-3,
        optimizer: str = "adam",
        momentum: float = 0.9,
        estimator: str = "shared_draw",
        prior: str | Prior = "gaussian",
        prior_precision: float = 1.0,
        pi: float = 0.5,
        std1: float = 1.0,
        std2: float = 0.0025,
        init_std: float = 0.01,
        init: str = "model",
        mc_samples: int = 1,
        kl_schedule: str = "linear",
        kl_warmup: float = 0.25,
        start: float = 0.5,
        cycles: int = 20,
        low: float = 0.01,
        swa_lr: float | None = None,
        rank: int = 0,
    ) -> None:
        self.average_from(plan, start, cycles, low, swa_lr)
        super().__init__(
            model,
            likelihood,
            plan,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            estimator=estimator,
            prior=prior,
            prior_precision=prior_precision,
            pi=pi,
            std1=std1,
            std2=std2,
            init_std=init_std,
            init=init,
            mc_samples=mc_samples,
            kl_schedule=kl_schedule,
            kl_warmup=kl_warmup,
        )
        self.averager = HWA(self.module, rank)
