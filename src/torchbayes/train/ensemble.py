"""Deep ensembles: several networks from different random starts, each trained as usual.

B. Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles,
NeurIPS 2017; Ensemble-MAP and Ensemble-MLE of the hypernetwork paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from torchbayes.core import distributed
from torchbayes.core.declaration import register
from torchbayes.likelihood import Likelihood
from torchbayes.optim import MAP
from torchbayes.posterior import Samples, Weights
from torchbayes.train.chains import restart
from torchbayes.train.method import Method, Plan

__all__ = ["EnsembleMethod"]

_MEMBERS = 5


@register(
    "ensemble",
    family="ensemble, masks, generator",
    posterior="Samples",
    summary="several networks from different random starts",
    paper="Lakshminarayanan et al. 2017; Ensemble-MAP/MLE of the hypernetwork paper",
)
class EnsembleMethod(Method):
    """A deep ensemble of MAP (or, with `prior=0`, MLE) networks.

    The members are trained one after another, `epochs` epochs each; under torchrun they are spread over
    the processes. They start from random weights; with `fit(init=…)` from the given ones, each with a last
    layer of its own or as `reset` says, or each from one of several given networks. Each learns a noise
    level of its own, where one is learned; predictions use one for all (`Likelihood.pool`).

    Args:
        members: Number of networks; if None one for each of several given starts, or else 5.
    """

    uses = (MAP,)
    one_per_rank = True
    starts_apart = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        members: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, likelihood, plan, **options)
        given = 1 if plan.start is None else len(plan.start)
        if members is None:
            members = given if given > 1 else _MEMBERS
        if given > 1 and members != given:
            raise ValueError(
                f"members is {members}, but init has {given} starting points: give one for each member"
            )
        if members < 1:
            raise ValueError(f"members is {members}: expected at least 1 network")
        self.members = members
        self.own = list(range(plan.rank, members, plan.world_size))
        self.finished = Samples(model)
        self._start()

    def _start(self) -> None:
        """Give the network a start of its own, random or given, and an optimiser of its own."""
        restart(self.model, self.plan)
        if self.plan.start is not None and self.own:
            self.plan.start.apply(self.model, self.own[len(self.finished) % len(self.own)])
        self.set_optimizer(self.build(MAP, self.model))
        self.noise.restart()

    @property
    def epochs(self) -> int:
        """Epochs of all members of this process together."""
        return self.plan.epochs * len(self.own)

    def begin_epoch(self, epoch: int) -> None:
        """Start the next member once the one before it is finished."""
        if epoch // self.plan.epochs > len(self.finished):
            self.finished.append()
            self._start()

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Keep the last member, and the noise level of every one, when its training ends."""
        self.noted["member"] = self.own[epoch // self.plan.epochs]
        if (epoch + 1) % self.plan.epochs == 0:
            self.noise.keep()
        if epoch + 1 == self.epochs:
            self.finished.append()

    def posterior(self) -> Samples:
        """Return all finished members, of all processes; if there is none yet, the one in training."""
        if self.plan.world_size > 1 and len(self.finished) == len(self.own):
            return self._pooled()
        result = Samples(self.model)
        for weights in self.finished:
            result.append(weights)
        if len(result) == 0:
            result.append()
        return result

    def _pooled(self) -> Samples:
        distributed.barrier()  # one process may have one member more
        result = Samples(self.model)
        for member in range(self.members):
            owner = member % self.plan.world_size
            mine = self.plan.rank == owner
            weights: Weights = (
                self.finished[member // self.plan.world_size] if mine else self.finished.current()
            )
            distributed.broadcast(list(weights.values()), owner)
            result.append(weights)
        return result

    def pooled(self, states: list[dict[str, Any]]) -> Samples:
        """Return all members, in their order."""
        result = Samples(self.model)
        for member in range(self.members):
            result.append(states[member % len(states)]["finished"][member // len(states)])
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the member in training and the finished ones."""
        return super().state_dict() | {"finished": list(self.finished)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the same member."""
        super().load_state_dict(state)
        self.finished = Samples(self.model)
        for weights in state["finished"]:
            self.finished.append(weights)
