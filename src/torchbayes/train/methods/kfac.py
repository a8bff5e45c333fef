"""K-FAC as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.kfac import KFAC
from torchbayes.prior import GaussianPrior
from torchbayes.train.method import Plan, register
from torchbayes.train.methods.vogn import NaturalGradientMethod, default_damping, default_lr

__all__ = ["KfacMethod"]


@register
class KfacMethod(NaturalGradientMethod):
    """Kronecker-factored approximate curvature.

    Args:
        lr: The learning rate α; with momentum β1 the effective rate is α / (1 − β1). If not given,
            0.01 · √(γ + δ/train_size) as for VOGN: a fixed rate that suits a small training set takes a
            network of a larger one, with its smaller damping, far into overfitting.
        beta1: The decay of the momentum.
        beta2: The weight of each batch's new curvature.
        prior_precision: The precision δ of the prior N(0, 1/δ) on every weight except norm layers'.
        prior: A Gaussian prior of its own for every weight, such as the posterior of an earlier task
            (`GaussianPrior.from_posterior`), in place of `prior_precision`.
        damping: γ, added to the curvature; 150 / train_size if not given.
        refresh_every: The most updates between inversions of a layer's factors; where its curvature has
            doubled they are inverted at once.
        momentum_correction: Where the schedule lowers the rate, lower the momentum with it.
    """

    name = "kfac"
    family = "one network"
    posterior_kind = "Point"
    summary = "one network, trained by natural gradients with a Kronecker product per layer"
    paper = "Martens & Grosse 2015; the baseline of the VOGN paper"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.1,
        prior_precision: float = 1.0,
        prior: GaussianPrior | None = None,
        damping: float | None = None,
        refresh_every: int = 10,
        momentum_correction: bool = False,
    ) -> None:
        super().__init__(model, likelihood, plan)
        damping = default_damping(plan, 1.0) if damping is None else damping
        if lr is None:
            lr = default_lr(plan, damping, prior_precision, 1.0)
        self.set_optimizer(
            KFAC(
                model,
                lr,
                train_size=plan.train_size,
                prior_precision=prior_precision,
                prior=prior,
                damping=damping,
                betas=(beta1, beta2),
                refresh_every=refresh_every,
                momentum_correction=momentum_correction,
            )
        )
