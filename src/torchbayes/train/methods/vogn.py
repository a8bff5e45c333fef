"""VOGN as a method."""

from __future__ import annotations

import math

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.optim.vogn import VOGN
from torchbayes.posterior import Posterior
from torchbayes.prior import GaussianPrior
from torchbayes.train.method import Method, Plan, register

__all__ = ["NaturalGradientMethod", "VognMethod", "default_damping"]


def default_damping(plan: Plan, augmentation: float) -> float:
    """A γ that holds the standard deviation of a weight without curvature at about 0.08.

    σ² is at most τ/(Nγ). The VOGN paper's settings have Nγ from 50 (LeNet-5) to 640 (ImageNet); without such
    a bound a small training set leaves the weights so uncertain that noise is all there is.
    """
    return 150.0 / (augmentation * plan.train_size)


def default_lr(plan: Plan, damping: float, prior_precision: float, augmentation: float) -> float:
    """An α with which no weight moves by more than about 0.005 times its normalised gradient in a step.

    A weight of curvature s and gradient √s·r moves by α√s·r/(s + δ̃ + γ), at most α·r/(2√(δ̃ + γ)).
    """
    return 0.01 * math.sqrt(damping + prior_precision / (augmentation * plan.train_size))


class NaturalGradientMethod(Method):
    """What the methods have in common whose optimiser holds the distribution of the weights."""

    reduces_gradients = False  # their squares and products with noise must not be averaged first
    optimizer: WeightOptimizer

    def posterior(self) -> Posterior:
        """What the optimiser has learned."""
        return self.optimizer.posterior()


@register
class VognMethod(NaturalGradientMethod):
    """Variational online Gauss-Newton.

    Args:
        lr: The learning rate α; with momentum β1 the effective rate is α / (1 − β1). If not given,
            0.01 · √(γ + δ/(ρ · train_size)), which suits training sets of any size.
        beta1: The decay of the momentum.
        beta2: The weight of each batch's new curvature; the paper's runs on CIFAR-10 use 0.999.
        prior_precision: The precision δ of the prior N(0, 1/δ) on every weight except norm layers'.
        prior: A Gaussian prior of its own for every weight, such as the posterior of an earlier task
            (`GaussianPrior.from_posterior`), in place of `prior_precision`.
        damping: γ, added to the curvature; 150 / (ρ · train_size) if not given.
        temperature: τ; below 1 the posterior is sharper than Bayes' rule has it.
        initial_temperature: τ at the start.
        temperature_epochs: The epochs until τ is `temperature`.
        mc_samples: The draws K per update.
        initial_precision: The curvature at the start; that of the first batch if not given.
        augmentation: ρ: how many times more data the augmented training set is worth.
        momentum_correction: Where the schedule lowers the rate, lower the momentum with it.
    """

    name = "vogn"
    family = "a Gaussian"
    posterior_kind = "Gaussian"
    summary = "a Gaussian over every weight, by natural gradients from per-example squares"
    paper = "Osawa et al. 2019"

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
        temperature: float = 1.0,
        initial_temperature: float = 0.1,
        temperature_epochs: float = 1.0,
        mc_samples: int = 1,
        initial_precision: float | None = None,
        augmentation: float = 1.0,
        momentum_correction: bool = False,
    ) -> None:
        super().__init__(model, likelihood, plan)
        damping = default_damping(plan, augmentation) if damping is None else damping
        if lr is None:
            lr = default_lr(plan, damping, prior_precision, augmentation)
        self.set_optimizer(
            VOGN(
                model,
                lr,
                train_size=plan.train_size,
                prior_precision=prior_precision,
                prior=prior,
                temperature=temperature,
                initial_temperature=initial_temperature,
                temperature_steps=round(temperature_epochs * plan.steps_per_epoch),
                mc_samples=mc_samples,
                damping=damping,
                betas=(beta1, beta2),
                initial_precision=initial_precision,
                augmentation=augmentation,
                momentum_correction=momentum_correction,
                generator=plan.generator,
            )
        )
