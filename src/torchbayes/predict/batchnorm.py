"""Batch-norm statistics for weights that were drawn or averaged."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.core.batch import arguments, split_batch, to_device
from torchbayes.core.names import named_modules, own_weights
from torchbayes.posterior import Posterior, Samples, Weights
from torchbayes.posterior.posterior import plain_network

__all__ = ["recalibrate_batchnorm", "recalibrate_each", "recalibrated_samples"]


def recalibrate_batchnorm(model: nn.Module, weights: Weights, loader: Iterable[Any]) -> Weights:
    """Re-estimate batch-norm statistics for weights that were drawn or averaged, not trained.

    The running mean and variance of every batch-norm layer become the averages over all batches of
    `loader` under `weights`. Dropout is off. The model itself is not changed.

    Args:
        model: The network.
        weights: The weights to use in it.
        loader: Batches of training data: inputs, or pairs of inputs and targets.

    Returns:
        `weights` with the statistics added or replaced; without batch norm, `weights` unchanged.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> new = tb.recalibrate_batchnorm(model, tb.snapshot(model), [torch.randn(64, 2) + 5])
        >>> bool((new["1.running_mean"] != model[1].running_mean).all())
        True
    """
    return recalibrate_each(model, [weights], loader)[0]


def recalibrate_each(
    model: nn.Module, draws: Sequence[Weights], loader: Iterable[Any]
) -> list[Weights]:
    """Re-estimate batch-norm statistics for each of several draws, in one pass over the data.

    Args:
        model: The network.
        draws: The weights of every draw.
        loader: Batches of training data: inputs, or pairs of inputs and targets.

    Returns:
        The result of `recalibrate_batchnorm` for every draw.
    """
    twin = copy.deepcopy(plain_network(model)).eval()
    norms = {
        name: module
        for name, _, module in named_modules(twin)
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }
    if not norms:
        return [dict(weights) for weights in draws]
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average that weights all batches equally
        norm.training = True
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    statistics = [
        {
            f"{name}.{buffer}": getattr(norm, buffer).clone()
            for name, norm in norms.items()
            for buffer in ("running_mean", "running_var", "num_batches_tracked")
        }
        for _ in draws
    ]
    used = [
        {name: tensor.to(device) for name, tensor in weights.items()} | own
        for weights, own in zip(draws, statistics, strict=True)
    ]
    with torch.no_grad():
        for batch in loader:
            args, kwargs = arguments(to_device(split_batch(batch)[0], device))
            for weights in used:
                torch.func.functional_call(twin, own_weights(twin, weights), args, kwargs)
    return [
        dict(weights) | _reached(norms, own) for weights, own in zip(draws, statistics, strict=True)
    ]


def recalibrated_samples(
    model: nn.Module, posterior: Posterior, loader: Iterable[Any], samples: int = 30, *,
    generator: torch.Generator | None = None, folder: str | Path | None = None,
) -> Samples:  # fmt: skip
    """Draw weights and give each draw its own batch-norm statistics on the training data.

    A posterior's draws share the statistics of its mean. With batch norm that is an approximation; the
    SWAG paper re-estimates them for every draw, at the cost of one pass over `loader` each.

    Args:
        model: The network, or the wrapper that it was trained in.
        posterior: The posterior to draw from.
        loader: Batches of training data; read once per draw, so it must not be an exhaustible iterator.
        samples: Number of draws (30 in the SWAG paper).
        generator: Source of the draws.
        folder: Keep the draws as files in this folder instead of in memory.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> q = tb.Gaussian(tb.snapshot(model), {"0.weight": torch.ones(3, 2)})
        >>> bank = tb.average.recalibrated_samples(model, q, [torch.randn(64, 2)], samples=4)
        >>> bool((bank[0]["1.running_mean"] != bank[1]["1.running_mean"]).all())
        True
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}: expected at least 1 draw")
    if iter(loader) is loader:
        raise ValueError(
            "the loader is an iterator and would be used up by the first draw: pass a list or a loader"
        )
    network = plain_network(model)
    posterior.check(network)
    bank = Samples(network, folder=folder)
    for draw in posterior.draws(samples, generator):
        bank.append(recalibrate_batchnorm(network, draw, loader))
    return bank


def _reached(norms: Iterable[str], statistics: Weights) -> Weights:
    """Return the statistics of the layers that the data reached; an auxiliary head keeps its own."""
    reached = {name for name in norms if int(statistics[f"{name}.num_batches_tracked"])}
    if not reached:
        raise ValueError(
            "the loader has no batches: batch norm needs data to re-estimate its statistics"
        )
    return {n: t.clone() for n, t in statistics.items() if n.rpartition(".")[0] in reached}
