"""What a chain looked like now and then: cheap numbers of some two hundred of its updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchbayes.optim.sampler import Sampler

__all__ = ["Tracer"]

_ROWS = 200


class Tracer:
    """Makes the rows of traces.jsonl.

    Args:
        total: The updates of a chain.

    Example:
        >>> from torchbayes.train.traces import Tracer
        >>> tracer = Tracer(1000)
        >>> [update for update in range(1, 16) if tracer.wants(update)]
        [5, 10, 15]
    """

    def __init__(self, total: int) -> None:
        self._every = max(1, total // _ROWS)
        self._before: dict[str, Tensor] = {}

    def wants(self, update: int) -> bool:
        """Whether the update with that number, from 1, is one to look at."""
        return update % self._every == 0

    def before(self, sampler: Sampler) -> None:
        """Remember the weights before an update that is wanted."""
        self._before = {
            name: p.detach().clone()
            for name, p in sampler.model.named_parameters()
            if p.requires_grad
        }

    @torch.no_grad()
    def row(
        self, sampler: Sampler, loss: float, *, chain: int, update: int, stacked: int | None = None
    ) -> dict[str, Any]:
        """The numbers after an update.

        Args:
            sampler: The chain's sampler.
            loss: The mean loss of the batch.
            chain: The chain's number.
            update: The update's number, from 1.
            stacked: The place of the chain among those whose weights are stacked, if they are.

        Returns:
            `energy` is the estimate of the negative log-posterior by this batch. `temperature`,
            `thermostat` and `update_size` (root mean square) are by layer.
        """
        group = sampler.param_groups[0]
        now = {n: p.detach() for n, p in sampler.model.named_parameters() if n in self._before}
        was = self._before
        prior = sampler.prior
        if stacked is not None:
            now = {name: tensor[stacked] for name, tensor in now.items()}
            was = {name: tensor[stacked] for name, tensor in was.items()}
            prior = getattr(prior, "prior", prior)
        sums: dict[str, list[float]] = {}
        for name, tensor in now.items():
            total = sums.setdefault(name.rpartition(".")[0], [0.0, 0.0])
            total[0] += float((tensor - was[name]).square().sum(dtype=torch.float64))
            total[1] += tensor.numel()
        vitals = sampler.vitals(stacked)
        vitals["update_size"] = {layer: (s / count) ** 0.5 for layer, (s, count) in sums.items()}
        likelihood = group["train_size"] / group["temperature"] * loss
        return {
            "chain": chain,
            "update": update,
            "lr": group["lr"],
            "loss": loss,
            "energy": likelihood - float(prior.log_prob(now)),
            **{
                what: {layer: float(f"{value:.5g}") for layer, value in layers.items()}
                for what, layers in vitals.items()
            },
        }
