"""MC-dropout as a method: MAP training with dropout that stays on for prediction."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.posterior import DropoutPosterior
from torchbayes.train.method import Method, Plan, register
from torchbayes.train.methods.map import point_optimizer
from torchbayes.variational import MCDropout

__all__ = ["DropoutMethod"]


@register
class DropoutMethod(Method):
    """Monte-Carlo dropout.

    Args:
        lr: The learning rate.
        optimizer: `adam` or `sgd`.
        momentum: SGD's momentum.
        prior_precision: The precision δ of the prior N(0, 1/δ): `weight_decay = δ / train_size`.
        p: The probability that an activation is dropped.
    """

    name = "dropout"
    summary = "one network with dropout left on, a mask for every draw"
    paper = "Gal & Ghahramani 2016; the baseline of the VOGN paper"

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
        p: float = 0.1,
    ) -> None:
        super().__init__(model, likelihood, plan)
        self.module: MCDropout = MCDropout(model, p)
        decay = prior_precision / plan.train_size
        # The optimiser sees the plain network: the wrapper has no parameters of its own.
        self.set_optimizer(point_optimizer(model, optimizer, lr, momentum, decay))

    def posterior(self) -> DropoutPosterior:
        """The weights together with the dropout."""
        return self.module.posterior()
