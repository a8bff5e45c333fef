"""Noisy K-FAC as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.noisy_kfac import NoisyKFAC
from torchbayes.prior import GaussianPrior
from torchbayes.train.method import Plan, register
from torchbayes.train.methods.vogn import NaturalGradientMethod, default_damping

__all__ = ["NoisyKfacMethod"]


@register
class NoisyKfacMethod(NaturalGradientMethod):
    """Noisy K-FAC: a matrix Gaussian over every layer's weights.

    Args:
        lr: The learning rate α; with momentum β1 the effective rate is α / (1 − β1).
        beta1: The decay of the momentum.
        beta2: The weight of each batch's new curvature.
        prior_precision: The precision δ of the prior N(0, 1/δ) on every weight except norm layers'.
        prior: A Gaussian prior of its own for every weight, such as the posterior of an earlier task
            (`GaussianPrior.from_posterior`), in place of `prior_precision`.
        damping: γ, added to the curvature; 150 / (ρ · train_size) if not given.
        temperature: τ; below 1 the posterior is sharper than Bayes' rule has it.
        initial_temperature: τ at the start.
        temperature_epochs: The epochs until τ is `temperature`.
        mc_samples: The draws per update.
        refresh_every: The most updates between inversions of a layer's factors; where its curvature has
            doubled they are inverted at once.
        augmentation: ρ: how many times more data the augmented training set is worth.
        momentum_correction: Where the schedule lowers the rate, lower the momentum with it.
    """

    name = "noisy-kfac"
    family = "a Gaussian"
    posterior_kind = "KroneckerGaussian"
    summary = "a Gaussian over each layer's weight matrix, by natural gradients"
    paper = "Zhang et al. 2018; the baseline of the VOGN paper"

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
        temperature: float = 1.0,
        initial_temperature: float = 0.1,
        temperature_epochs: float = 1.0,
        mc_samples: int = 1,
        refresh_every: int = 10,
        augmentation: float = 1.0,
        momentum_correction: bool = False,
    ) -> None:
        super().__init__(model, likelihood, plan)
        self.set_optimizer(
            NoisyKFAC(
                model,
                lr,
                train_size=plan.train_size,
                prior_precision=prior_precision,
                prior=prior,
                temperature=temperature,
                initial_temperature=initial_temperature,
                temperature_steps=round(temperature_epochs * plan.steps_per_epoch),
                mc_samples=mc_samples,
                damping=default_damping(plan, augmentation) if damping is None else damping,
                betas=(beta1, beta2),
                refresh_every=refresh_every,
                augmentation=augmentation,
                momentum_correction=momentum_correction,
                generator=plan.generator,
            )
        )
