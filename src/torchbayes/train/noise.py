"""A learned noise level in training: each network of a run owns one, and in the end there is one for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchbayes.core import distributed
from torchbayes.likelihood import Likelihood

__all__ = ["LearnedNoise"]

_LR = 1e-2


class LearnedNoise:
    """The likelihood's own parameters, trained alike by every method: with an Adam of their own.

    Members of an ensemble and chains that run one after another each start from the initial values, with a
    new Adam: a new network with the noise level of one that has been trained would meet enormous losses.

    Args:
        likelihood: The likelihood, whose parameters are trained in place.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.parameters = {n: p for n, p in likelihood.named_parameters() if p.requires_grad}
        self.initial = self._now()
        self.ends: list[dict[str, Tensor]] = []
        self._optimizer = self._adam()

    def _now(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _adam(self) -> torch.optim.Adam | None:
        own = list(self.parameters.values())
        return torch.optim.Adam(own, lr=_LR) if own else None

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
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.parameters.values()):
            self._optimizer.step()

    def restart(self) -> None:
        """Begin anew, for the next network."""
        self._set(self.initial)
        self.zero_grad()
        self._optimizer = self._adam()

    def keep(self) -> None:
        """Keep the values with which a network has ended."""
        self.ends.append(self._now())

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
            self._set(ends[0])
        return True

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(values[name])

    def _of_all_processes(self) -> list[dict[str, Tensor]]:
        if not self.parameters or distributed.world_size() == 1:
            return self.ends
        counts = [int(n) for n in distributed.gather(torch.tensor(float(len(self.ends))))]
        result = []
        for rank, count in enumerate(counts):
            for index in range(count):
                mine = rank == distributed.rank()
                values = self.ends[index] if mine else self._now()
                distributed.broadcast(list(values.values()), rank)
                result.append(values)
        return result

    def _placed(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: values[name].to(p.device) for name, p in self.parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the likelihood's present values."""
        adam = None if self._optimizer is None else self._optimizer.state_dict()
        return {"initial": self.initial, "ends": self.ends, "optimizer": adam}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.initial = self._placed(state["initial"])
        self.ends = [self._placed(values) for values in state["ends"]]
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
