"""OGN as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.ogn import OGN
from torchbayes.prior import GaussianPrior
from torchbayes.train.method import Plan, register
from torchbayes.train.methods.vogn import NaturalGradientMethod, default_damping

__all__ = ["OgnMethod"]


@register
class OgnMethod(NaturalGradientMethod):
    """Online Gauss-Newton: VOGN without noise.

    Args:
        lr: The learning rate α; with momentum β1 the effective rate is α / (1 − β1).
        beta1: The decay of the momentum.
        beta2: The weight of each batch's new curvature.
        prior_precision: The precision δ of the prior N(0, 1/δ) on every weight except norm layers'.
        prior: A Gaussian prior of its own for every weight, such as the posterior of an earlier task
            (`GaussianPrior.from_posterior`), in place of `prior_precision`.
        damping: γ, added to the curvature; 150 / (ρ · train_size) if not given.
        augmentation: ρ: how many times more data the augmented training set is worth.
        momentum_correction: Where the schedule lowers the rate, lower the momentum with it.
    """

    name = "ogn"
    family = "one network"
    posterior_kind = "Point"
    summary = "one network, trained by natural gradients from per-example squares"
    paper = "Osawa et al. 2019"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 3e-3,
        beta1: float = 0.9,
        beta2: float = 0.1,
        prior_precision: float = 1.0,
        prior: GaussianPrior | None = None,
        damping: float | None = None,
        augmentation: float = 1.0,
        momentum_correction: bool = False,
    ) -> None:
        super().__init__(model, likelihood, plan)
        self.set_optimizer(
            OGN(
                model,
                lr,
                train_size=plan.train_size,
                prior_precision=prior_precision,
                prior=prior,
                damping=default_damping(plan, augmentation) if damping is None else damping,
                betas=(beta1, beta2),
                augmentation=augmentation,
                momentum_correction=momentum_correction,
            )
        )
