"""Traces of a chain: cheap diagnostics of about two hundred of its updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.names import named_parameters
from torchbayes.core.reading import is_number
from torchbayes.optim.sampler import Sampler

__all__ = ["Tracer", "are_traces"]

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
        self, sampler: Sampler, loss: Tensor, *, chain: int, update: int, stacked: int | None = None
    ) -> tuple[list[Tensor], Callable[[list[float]], dict[str, Any]]]:
        """Return the numbers that the diagnostics after an update need, and the function of them.

        Args:
            sampler: The chain's sampler.
            loss: Mean loss of the batch.
            chain: Number of the chain.
            update: Number of the update, from 1.
            stacked: Index of the chain among stacked ones, if weights are stacked.

        Returns:
            The function returns the row. `energy` is this batch's estimate of the negative log-posterior.
            `temperature`, `thermostat` and `update_size` (root mean square) are by layer.
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
        sums = sampler.vital_sums(stacked)
        moved = sums["update_size"] = {}
        for name, tensor in now.items():
            square = (tensor - was[name]).square().sum(dtype=torch.float64)
            moved.setdefault(name.rpartition(".")[0], []).append((square, tensor.numel()))
        numbers = [loss.detach(), prior.log_prob(now)]
        numbers += [s for of in sums.values() for some in of.values() for s, _ in some]
        per_example = group["train_size"] / group["temperature"]
        lr, cold = group["lr"], group.get("prior_temperature", 1.0)

        def finished(values: list[float]) -> dict[str, Any]:
            loss, log_prior, *rest = values
            left = iter(rest)
            vitals = sampler.averages(sums, lambda _: next(left))
            squares = vitals["update_size"]
            vitals["update_size"] = {layer: mean**0.5 for layer, mean in squares.items()}
            return {
                "chain": chain,
                "update": update,
                "lr": lr,
                "loss": loss,
                "energy": per_example * loss - log_prior / cold,
                **{
                    what: {layer: float(f"{value:.5g}") for layer, value in layers.items()}
                    for what, layers in vitals.items()
                },
            }

        return numbers, finished


def are_traces(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tables have the form of a run's rows: the same numbers of the same layers in each."""

    def form(row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: set(value) if isinstance(value, dict) else None for name, value in row.items()
        }

    def fine(row: Mapping[str, Any]) -> bool:
        counted = all(type(row.get(name)) is int and row[name] >= 0 for name in ("chain", "update"))
        tables = [value for value in row.values() if isinstance(value, dict)]
        single = (value for value in row.values() if not isinstance(value, dict))
        inside = (value for table in tables for value in table.values())
        return counted and bool(tables) and all(map(is_number, (*single, *inside)))

    return all(fine(row) and form(row) == form(rows[0]) for row in rows)
