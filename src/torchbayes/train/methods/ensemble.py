"""Deep ensembles: several networks from different random starts, each trained as usual.

B. Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles,
NeurIPS 2017; Ensemble-MAP and Ensemble-MLE of the hypernetwork paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchbayes.core import distributed
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Samples, Weights, snapshot
from torchbayes.train.method import Method, Plan, register
from torchbayes.train.methods.map import MapMethod

__all__ = ["EnsembleMethod"]


@register
class EnsembleMethod(Method):
    """A deep ensemble of MAP (or, with `prior_precision=0`, MLE) networks.

    The members are trained one after another, `epochs` epochs each; under torchrun they are spread over
    the processes.

    Args:
        lr: The learning rate.
        optimizer: `adam` or `sgd`.
        momentum: SGD's momentum.
        prior_precision: The precision δ of each member's prior N(0, 1/δ).
        members: The number of networks.
    """

    name = "ensemble"
    family = "ensemble, masks, generator"
    posterior_kind = "Samples"
    summary = "several networks from different random starts"
    paper = "Lakshminarayanan et al. 2017; Ensemble-MAP/MLE of the hypernetwork paper"
    one_per_rank = True

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
        members: int = 5,
    ) -> None:
        super().__init__(model, likelihood, plan)
        if members < 1:
            raise ValueError(f"members is {members}: expected at least 1 network")
        self.members = members
        self.own = list(range(plan.rank, members, plan.world_size))
        self._member_options = {
            "lr": lr,
            "optimizer": optimizer,
            "momentum": momentum,
            "prior_precision": prior_precision,
        }
        self.finished = Samples(model)
        self._start()

    def _start(self) -> None:
        """Give the network a fresh random start and an optimiser of its own."""
        # From the run's generator, so that members differ over ranks and a resumed run repeats them.
        seed = int(
            torch.randint(
                2**62, (), generator=self.plan.generator, device=self.plan.generator.device
            )
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            fresh = self.plan.new_model()
        with torch.no_grad():
            own = [*self.model.parameters(), *self.model.buffers()]
            for old, new in zip(own, [*fresh.parameters(), *fresh.buffers()], strict=True):
                old.copy_(new)
        member = MapMethod(self.model, self.likelihood, self.plan, **self._member_options)  # type: ignore[arg-type]
        self.optimizer, self.scheduler = member.optimizer, member.scheduler

    @property
    def epochs(self) -> int:
        """The epochs of all members of this process together."""
        return self.plan.epochs * len(self.own)

    def begin_epoch(self, epoch: int) -> None:
        """Start the next member once the one before it is finished."""
        if epoch // self.plan.epochs > len(self.finished):
            self.finished.append()
            self._start()

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Keep the last member when its training ends."""
        if epoch + 1 == self.epochs:
            self.finished.append()

    def posterior(self) -> Samples:
        """All finished members, of all processes; if there is none yet, the one in training."""
        if self.plan.world_size > 1 and len(self.finished) == len(self.own):
            return self._pooled()
        result = Samples(self.model)
        for weights in self.finished:
            result.append(weights)
        if len(result) == 0:
            result.append()
        return result

    def _pooled(self) -> Samples:
        result = Samples(self.model)
        for member in range(self.members):
            owner = member % self.plan.world_size
            mine = self.plan.rank == owner
            weights: Weights = (
                self.finished[member // self.plan.world_size] if mine else snapshot(self.model)
            )
            distributed.broadcast(list(weights.values()), owner)
            result.append(weights)
        return result

    def state_dict(self) -> dict[str, Any]:
        """The member in training and the finished ones."""
        return super().state_dict() | {"finished": list(self.finished)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the same member."""
        super().load_state_dict(state)
        self.finished = Samples(self.model)
        for weights in state["finished"]:
            self.finished.append(weights)
