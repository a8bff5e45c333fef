"""Traces of a chain: cheap diagnostics of about two hundred of its updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchbayes.core.names import named_parameters
from torchbayes.optim.sampler import Sampler

__all__ = ["Tracer"]

_ROWS = 200


class Tracer:
    """Computes the rows of traces.jsonl.

    Args:
        total: Number of updates of a chain.

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
        """Whether the update with this number, from 1, is traced."""
        return update % self._every == 0

    def before(self, sampler: Sampler) -> None:
        """Keep the weights before a traced update."""
        self._before = {
            name: p.detach().clone()
            for name, p in named_parameters(sampler.model).items()
            if p.requires_grad
        }

    @torch.no_grad()
    def row(
        self, sampler: Sampler, loss: float, *, chain: int, update: int, stacked: int | None = None
    ) -> dict[str, Any]:
        """Return the diagnostics after an update.

        Args:
            sampler: The chain's sampler.
            loss: Mean loss of the batch.
            chain: Number of the chain.
            update: Number of the update, from 1.
            stacked: Index of the chain among stacked ones, if weights are stacked.

        Returns:
            `energy` is this batch's estimate of the negative log-posterior. `temperature`,
            `thermostat` and `update_size` (root mean square) are by layer.
        """
        group = sampler.param_groups[0]
        now = {
            n: p.detach() for n, p in named_parameters(sampler.model).items() if n in self._before
        }
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
