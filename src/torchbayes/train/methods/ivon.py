"""IVON as a method."""

from __future__ import annotations

import math

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.ivon import IVON
from torchbayes.prior import GaussianPrior
from torchbayes.train.method import Plan, register
from torchbayes.train.methods.vogn import NaturalGradientMethod

__all__ = ["IvonMethod"]


@register
class IvonMethod(NaturalGradientMethod):
    """Improved variational online Newton.

    Args:
        lr: The learning rate α, of about SGD's size.
        beta1: The decay of the momentum.
        beta2: The decay of the curvature.
        prior_precision: The precision of the prior N(0, 1/prior_precision) on every weight except norm
            layers'; divided by the training set's size it is the paper's δ.
        prior: A Gaussian prior of its own for every weight, such as the posterior of an earlier task
            (`GaussianPrior.from_posterior`), in place of `prior_precision`.
        temperature: Below 1 the posterior is sharper than Bayes' rule has it.
        mc_samples: The draws per update.
        initial_curvature: h0, the curvature at the start.
        clip_radius: ξ, the largest step of a weight before it is multiplied by the rate.
    """

    name = "ivon"
    family = "a Gaussian"
    posterior_kind = "Gaussian"
    summary = "a Gaussian over every weight, by natural gradients at the price of Adam"
    paper = "Shen et al. 2024, the successor of VOGN"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 0.3,
        beta1: float = 0.9,
        beta2: float = 0.9999,
        prior_precision: float = 1.0,
        prior: GaussianPrior | None = None,
        temperature: float = 1.0,
        mc_samples: int = 1,
        initial_curvature: float = 0.3,
        clip_radius: float = math.inf,
    ) -> None:
        super().__init__(model, likelihood, plan)
        self.set_optimizer(
            IVON(
                model,
                lr,
                train_size=plan.train_size,
                prior_precision=prior_precision,
                prior=prior,
                temperature=temperature,
                mc_samples=mc_samples,
                betas=(beta1, beta2),
                initial_curvature=initial_curvature,
                clip_radius=clip_radius,
                generator=plan.generator,
            )
        )
