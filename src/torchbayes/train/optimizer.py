"""Methods whose optimiser has it all: it moves the weights and knows the posterior."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Posterior
from torchbayes.train.method import Method, Plan

__all__ = ["OptimizerMethod"]


class OptimizerMethod(Method):
    """A method that is an optimiser with a `posterior()`: MAP and the natural-gradient family."""

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, **options: Any
    ) -> None:
        super().__init__(model, likelihood, plan, **options)
        self.set_optimizer(self.build(self.algorithm, model))

    def posterior(self) -> Posterior:
        """Return what the optimiser has learned."""
        posterior: Posterior = self.optimizer.posterior()  # type: ignore[attr-defined]
        return posterior
