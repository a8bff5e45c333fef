"""Deep ensembles: several networks from different random starts, each trained as usual.

B. Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles,
NeurIPS 2017; Ensemble-MAP and Ensemble-MLE of the hypernetwork paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core import distributed
from torchbayes.core.batch import (
    as_labels,
    batch_weights,
    map_tensors,
    network_dtype,
    split_batch,
    suited,
)
from torchbayes.core.declaration import register
from torchbayes.core.device import forked_random_numbers
from torchbayes.data.order import EpochLoader
from torchbayes.likelihood import Likelihood
from torchbayes.optim import MAP
from torchbayes.posterior import Samples, Weights, snapshot
from torchbayes.posterior.posterior import assign
from torchbayes.train.chains import restart
from torchbayes.train.method import Method, Plan
from torchbayes.train.stacked_chains import StackedChains, StackedPrior

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

    The members are trained `epochs` epochs each, every one on batches of its own; under torchrun they are
    spread over the processes. They start from random weights; with `fit(init=…)` from the given ones, each
    with a last layer of its own or as `reset` says, or each from one of several given networks. Each learns
    a noise level of its own, where one is learned; predictions use one for all (`Likelihood.pool`).

    Args:
        members: Number of networks; if None one for each of several given starts, or else 5.
        side_by_side: Train the members of a process together, through `torch.func.vmap`, instead of one after
            another: faster for small networks on data in memory, and the same members up to rounding. The
            history then has the mean over members. If one breaks down, all go back and take shorter steps.
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
        side_by_side: bool = False,
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
        self.stack: StackedChains | None = None
        self._losses = torch.zeros(0)
        if side_by_side and len(self.own) > 1:
            self._stack_members()
        if self.stack is None:
            self._start()

    def _stack_members(self) -> None:
        if not self.plan.joins:
            raise ValueError(
                "members side by side need data in memory, and no accumulate, clip_norm, amp, compile or "
                "memory_format: leave out side_by_side"
            )
        start = self.plan.start
        if (
            start is not None
            and len(start) > 1
            and not all(p.requires_grad for p in self.model.parameters())
        ):
            raise ValueError(
                "members side by side share what is frozen, but init has several starting points: leave out "
                "side_by_side"
            )
        starts = []
        for member in self.own:
            self._restart(member)
            starts.append(snapshot(self.model))
        self.stack = StackedChains(self.model, self.likelihood, starts, self.plan.output)
        self.noise.stack(len(self.own))
        prior = self.build(MAP, self.model).prior
        self.set_optimizer(self.build(MAP, self.stack.model, prior=StackedPrior.of(prior)))
        self._try_stack()

    def _try_stack(self) -> None:
        """Raise an error if the loss of the first batch cannot be computed for all members together."""
        if self.plan.peek is None:
            return
        batch = self.plan.peek()
        inputs, targets = split_batch(batch)
        assert targets is not None
        device = next(self.model.parameters()).device
        given = (
            suited(inputs, device, network_dtype(self.model)),
            as_labels(targets),
            batch_weights(batch),
        )
        parts = (map_tensors(given, lambda tensor: tensor.to(device)),) * len(self.own)
        with forked_random_numbers(), torch.no_grad():
            try:
                self.loss(*_joined(parts))
            except RuntimeError as error:
                raise ValueError(
                    "members side by side need a network and a loss that torch.func.vmap can run, which "
                    f"is not so with {self.likelihood!r} on these data "
                    f"({str(error).splitlines()[0][:200]}): leave out side_by_side"
                ) from error

    def _restart(self, member: int) -> None:
        restart(self.model, self.plan)
        if self.plan.start is not None:
            self.plan.start.apply(self.model, member)

    def _start(self) -> None:
        """Give the network a start of its own, random or given, and an optimiser of its own."""
        self._restart(self.own[len(self.finished) % len(self.own)] if self.own else 0)
        self.set_optimizer(self.build(MAP, self.model))
        self.noise.restart()

    @property
    def epochs(self) -> int:
        """Epochs of all members of this process together."""
        return self.plan.epochs * (1 if self.stack is not None else len(self.own))

    @property
    def moving(self) -> nn.Module:
        """The network, or the stacked weights of all."""
        return self.model if self.stack is None else self.stack.model

    def suspect(self) -> nn.Module:
        """Return the network, of stacked members with the weights of the first whose loss is not finite."""
        if self.stack is not None:
            bad = (~self._losses.isfinite()).nonzero().flatten().tolist()
            assign(self.model, self.stack.weights(bad[0] if bad else 0))
        return self.model

    def batches(self, loader: EpochLoader, epoch: int, start: int) -> Iterator[Any]:
        """Go through an epoch's batches; of stacked members, those that each would have alone, joined."""
        if self.stack is None:
            yield from super().batches(loader, epoch, start)
            return
        places = range(len(self.own))
        every = (loader.batches(place * self.plan.epochs + epoch, start) for place in places)
        for parts in zip(*every, strict=True):
            yield _joined(parts)

    def loss(self, inputs: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch; every stacked member gets its own gradient."""
        if self.stack is None:
            return super().loss(inputs, targets, weights)
        losses = self.stack.losses(inputs, targets, weights, self.noise.parameters, apart=True)
        values = self._losses = losses.detach()
        self.logs = {"nll": values.mean(), "worst": values.max()}
        # Its value is the mean over members, its gradient that of the sum.
        return losses.sum() - values.sum() + values.mean()

    def begin_epoch(self, epoch: int) -> None:
        """Start the next member once the one before it is finished."""
        if epoch // self.plan.epochs > len(self.finished):
            self.finished.append()
            self._start()

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Keep the last member, and the noise level of every one, when its training ends."""
        if self.stack is not None:
            self._end_epoch(self.stack, epoch)
            return
        self.noted["member"] = self.own[epoch // self.plan.epochs]
        if (epoch + 1) % self.plan.epochs == 0:
            self.noise.keep()
        if epoch + 1 == self.epochs:
            self.finished.append()

    def _end_epoch(self, stack: StackedChains, epoch: int) -> None:
        """Keep all members at the end; until then the first is scored."""
        assign(self.model, stack.weights(0))
        self.noise.show(0)
        if epoch + 1 == self.epochs:
            places = range(len(self.own))
            self.noise.keep(places)
            for place in places:
                self.finished.append(stack.weights(place))

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
        state = super().state_dict() | {"finished": list(self.finished)}
        return state if self.stack is None else state | {"stack": self.stack.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the same member."""
        super().load_state_dict(state)
        if self.stack is not None:
            self.stack.model.load_state_dict(state["stack"])
        self.finished = Samples(self.model)
        for weights in state["finished"]:
            self.finished.append(weights)


def _joined(parts: tuple[Any, ...]) -> Any:
    """Return trees of tensors, all alike, as one of tensors that follow each other."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _joined(tuple(part[key] for part in parts)) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(map(_joined, zip(*parts, strict=True)))
    return torch.cat(parts) if isinstance(first, Tensor) else first
