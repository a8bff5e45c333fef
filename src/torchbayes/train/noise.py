"""A learned noise level in training: each network of a run owns one, and in the end there is one for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core import distributed
from torchbayes.likelihood import Likelihood

__all__ = ["LearnedNoise"]

_LR = 1e-2


class LearnedNoise:
    """The likelihood's own parameters, trained alike by every method: with an Adam of their own.

    Members of an ensemble and chains that run one after another each start from the initial values, with a
    new Adam: a new network with the noise level of one that has been trained would meet enormous losses.
    Chains side by side have a value each.

    Attributes:
        parameters: What is trained: the likelihood's parameters, or a stack of values for each.
        stacked: Whether they are stacks.

    Args:
        likelihood: The likelihood, whose parameters are trained in place.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self._own = {n: p for n, p in likelihood.named_parameters() if p.requires_grad}
        self.parameters = self._own
        self.stacked = False
        self.initial = self._now()
        self.ends: list[dict[str, Tensor]] = []
        self._optimizer = self._adam()

    def _now(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _adam(self) -> torch.optim.Adam | None:
        own = list(self.parameters.values())
        return torch.optim.Adam(own, lr=_LR) if own else None

    def stack(self, count: int) -> None:
        """Train a value for each of `count` networks side by side."""
        self.stacked = True
        self.parameters = {
            name: nn.Parameter(torch.stack([p.detach()] * count)) for name, p in self._own.items()
        }
        self.initial = self._now()
        self._optimizer = self._adam()

    def show(self, row: int) -> None:
        """Give the likelihood the present values of one of the networks side by side."""
        self._set(self._own, {name: p.detach()[row] for name, p in self.parameters.items()})

    def zero_grad(self) -> None:
        """Clear the gradients."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def step(self) -> None:
        """Take one step, if there are gradients.

        Of chains side by side one may break down: its gradients are not finite, and the others go on.
        """
        if self._optimizer is None:
            return
        if self.stacked:
            for p in self.parameters.values():
                if p.grad is not None:
                    p.grad.nan_to_num_(0.0, 0.0, 0.0)
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.parameters.values()):
            self._optimizer.step()

    def restart(self) -> None:
        """Begin anew, for the next network."""
        self._set(self.parameters, self.initial)
        self.zero_grad()
        self._optimizer = self._adam()

    def keep(self, rows: Iterable[int] = ()) -> None:
        """Keep the values with which a network has ended, or each of some of those side by side."""
        now = self._now()
        if not self.stacked:
            self.ends.append(now)
            return
        self.ends += [{name: value[row] for name, value in now.items()} for row in rows]

    def pool(self, ends: list[dict[str, Tensor]] | None = None) -> bool:
        """Give the likelihood one value for all networks; return whether it was changed.

        Args:
            ends: The values with which the networks have ended; those of all processes if None.
        """
        ends = self._of_all_processes() if ends is None else [self._placed(end) for end in ends]
        if not self.parameters or not ends:
            return False
        if len(ends) > 1:
            self.likelihood.pool(ends)
        else:  # what was trained last may be a chain that broke down
            self._set(self._own, ends[0])
        return True

    @staticmethod
    @torch.no_grad()
    def _set(parameters: Mapping[str, Tensor], values: dict[str, Tensor]) -> None:
        for name, p in parameters.items():
            p.copy_(values[name])

    def _of_all_processes(self) -> list[dict[str, Tensor]]:
        if not self.parameters or distributed.world_size() == 1:
            return self.ends
        counts = [int(n) for n in distributed.gather(torch.tensor(float(len(self.ends))))]
        result = []
        for rank, count in enumerate(counts):
            for index in range(count):
                mine = rank == distributed.rank()
                own = {name: p.detach().clone() for name, p in self._own.items()}
                values = self.ends[index] if mine else own
                distributed.broadcast(list(values.values()), rank)
                result.append(values)
        return result

    def _placed(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: values[name].to(p.device) for name, p in self.parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the likelihood's present values."""
        adam = None if self._optimizer is None else self._optimizer.state_dict()
        stack = {"stack": self._now()} if self.stacked else {}
        return {"initial": self.initial, "ends": self.ends, "optimizer": adam, **stack}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.initial = self._placed(state["initial"])
        self.ends = [self._placed(values) for values in state["ends"]]
        if self.stacked:
            self._set(self.parameters, state["stack"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
