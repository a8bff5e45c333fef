"""Methods whose optimiser has it all: it moves the weights and knows the posterior."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from torchbayes.core.names import named_parameters
from torchbayes.core.parameters import norm_parameters
from torchbayes.laplace import Laplace
from torchbayes.likelihood import Likelihood
from torchbayes.optim import MAP
from torchbayes.optim.base import ModelOptimizer
from torchbayes.posterior import Posterior
from torchbayes.train.method import Method, Plan

__all__ = ["MapMethod", "OptimizerMethod", "Share"]


class OptimizerMethod(Method):
    """A method that is an optimiser with a `posterior()`: MAP and the natural-gradient family.

    Attributes:
        trains_with: The optimiser's class, if that is not the declared class itself.
    """

    trains_with: ClassVar[type[ModelOptimizer] | None] = None

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, **options: Any
    ) -> None:
        super().__init__(model, likelihood, plan, **options)
        self.set_optimizer(self.build(self.trains_with or self.algorithm, model))

    def posterior(self) -> Posterior:
        """Return what the optimiser has learned."""
        posterior: Posterior = self.optimizer.posterior()  # type: ignore[attr-defined]
        return posterior


class MapMethod(OptimizerMethod):
    """MAP, whose prior may choose itself while it trains.

    A. Immer et al., Scalable Marginal Likelihood Estimation for Model Selection in Deep Learning, ICML 2021:
    every few epochs the evidence of a Kronecker-factored Laplace posterior around the current weights has its
    maximum at a precision δ*, and the prior's log δ goes half way to log δ*.

    Args:
        evidence_every: Epochs between two choices of the prior's precision by the evidence, which cost a pass
            over the training data each; 0 to keep the one that is given.
    """

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, *, evidence_every: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, likelihood, plan, **options)
        if evidence_every < 0:
            raise ValueError(f"evidence_every is {evidence_every}: expected 0 or more epochs")
        self.evidence_every = evidence_every
        if evidence_every and not self._map.precision:
            raise ValueError(
                f"evidence_every changes a prior of one precision above 0, and the prior is "
                f"{self._map.prior!r}: start from a number, such as prior=1"
            )

    @property
    def _map(self) -> MAP:
        assert isinstance(self.optimizer, MAP)
        return self.optimizer

    def loss(self, inputs: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch; the history has the prior's precision if it changes."""
        loss = super().loss(inputs, targets, weights)
        if self.evidence_every:
            self.logs["prior_precision"] = loss.detach().new_full(
                (), float(self._map.precision or 0.0)
            )
        return loss

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Let the evidence choose the prior, except after the last epoch: no training would follow."""
        if (
            self.evidence_every
            and (epoch + 1) % self.evidence_every == 0
            and epoch + 1 < self.epochs
        ):
            norms, now = norm_parameters(self.model), self._map.precision
            assert now is not None
            la = Laplace(
                self.model, Share(batches, self.plan), self.likelihood, prior=now, check=False,
                output=self.plan.output,
                subset=[n for n, p in named_parameters(self.model).items()
                        if p.requires_grad and n not in norms],
            )  # fmt: skip
            best = la.optimize_prior(noise=False).precision
            assert isinstance(best, float)
            self._map.precision = math.sqrt(now * best)


class Share:
    """This process's share of the training data, for one pass."""

    def __init__(self, batches: Iterable[Any], plan: Plan) -> None:
        self._batches = iter(batches)
        self.world_size = plan.world_size

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)
