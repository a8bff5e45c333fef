"""Batch-norm statistics for weights that were drawn or averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.core.batch import arguments, device_of, split_batch, to_device
from torchbayes.core.names import named_modules, own_weights
from torchbayes.core.private import private_copy
from torchbayes.posterior import Posterior, Samples, Weights
from torchbayes.posterior.posterior import plain_network

__all__ = [
    "check_recalibratable",
    "check_repeatable",
    "recalibrate_batchnorm",
    "recalibrate_each",
    "shared_statistics",
]


@overload
def recalibrate_batchnorm(
    model: nn.Module, weights: Weights, loader: Iterable[Any], samples: int = ..., *,
    generator: torch.Generator | None = ..., folder: str | Path | None = ...,
) -> Weights: ...  # fmt: skip


@overload
def recalibrate_batchnorm(
    model: nn.Module, weights: Posterior, loader: Iterable[Any], samples: int = ..., *,
    generator: torch.Generator | None = ..., folder: str | Path | None = ...,
) -> Samples: ...  # fmt: skip


def recalibrate_batchnorm(
    model: nn.Module, weights: Weights | Posterior, loader: Iterable[Any], samples: int = 30, *,
    generator: torch.Generator | None = None, folder: str | Path | None = None,
) -> Weights | Samples:  # fmt: skip
    """Re-estimate batch-norm statistics for weights that were drawn or averaged, not trained.

    The running mean and variance of every batch-norm layer become the averages over all batches of
    `loader` under `weights`. Dropout is off. The model itself is not changed.

    The draws of a Gaussian share the statistics of its mean, which is an approximation. Given a posterior,
    this draws from it and gives each draw its own statistics, as the SWAG paper does, at the cost of one pass
    over `loader` each. `predictive(…, recalibrate=loader)` does the same for one prediction.

    Args:
        model: The network, or the wrapper that it was trained in.
        weights: The weights to use in it, or a posterior to draw from.
        loader: Batches of training data: inputs, or pairs of inputs and targets. For a posterior it is read
            once per draw, so it must not be an exhaustible iterator.
        samples: Number of draws from a posterior (30 in the SWAG paper).
        generator: Source of the draws.
        folder: Keep the draws as files in this folder instead of in memory.

    Returns:
        `weights` with the statistics added or replaced; without batch norm, `weights` unchanged. For a
        posterior, the draws, which are a posterior too.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> new = tb.recalibrate_batchnorm(model, tb.snapshot(model), [torch.randn(64, 2) + 5])
        >>> bool((new["1.running_mean"] != model[1].running_mean).all())
        True
        >>> q = tb.Gaussian(tb.snapshot(model), {"0.weight": torch.ones(3, 2)})
        >>> bank = tb.recalibrate_batchnorm(model, q, [torch.randn(64, 2)], samples=4)
        >>> bool((bank[0]["1.running_mean"] != bank[1]["1.running_mean"]).all())
        True
    """
    if not isinstance(weights, Posterior):
        return recalibrate_each(model, [weights], loader)[0]
    if samples < 1:
        raise ValueError(f"samples is {samples}: expected at least 1 draw")
    check_repeatable(loader)
    network = plain_network(model)
    weights.check(network)
    check_recalibratable(weights)
    bank = Samples(network, folder=folder)
    for draw in weights.draws(samples, generator):
        bank.append(recalibrate_each(network, [draw], loader)[0])
    return bank


def check_repeatable(loader: Iterable[Any]) -> None:
    """Raise a `ValueError` if a loader can be read only once."""
    _check_loader(loader)
    if iter(loader) is loader:
        raise ValueError(
            "the loader is an iterator and would be used up by the first draw: pass a list or a loader"
        )


def check_recalibratable(posterior: Posterior) -> None:
    """Raise a `ValueError` if a posterior's draws are more than weights."""
    if type(posterior).call is not Posterior.call:
        raise ValueError(
            f"the draws of a {type(posterior).__name__} are masks on the weights that were trained, with the "
            "batch-norm statistics of that training: there is nothing to re-estimate"
        )


def _check_loader(loader: Any) -> None:
    if isinstance(loader, (Tensor, Mapping)) or not isinstance(loader, Iterable):
        raise TypeError(
            f"the training data for batch norm are a {type(loader).__name__}: expected batches, from a "
            "loader or in a list such as [inputs]"
        )


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
    _check_loader(loader)
    twin = private_copy(plain_network(model))
    norms = _running_norms(twin)
    if not norms:
        return [dict(weights) for weights in draws]
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average that weights all batches equally
        norm.training = True
    device = device_of(twin)
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


def _running_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers with running statistics, by name."""
    return {
        name: module
        for name, _, module in named_modules(model)
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }


def shared_statistics(model: nn.Module, posterior: Posterior, draw: Weights) -> str | None:
    """Name a batch-norm layer whose statistics the posterior's draws share although they differ before it.

    Layers are taken to run in the order in which the model has them.

    Args:
        model: The network.
        posterior: The posterior.
        draw: One of its draws.
    """
    if not posterior.shares_statistics:
        return None
    norms = _running_norms(model)
    if not norms:
        return None
    mean = posterior.mean()
    varies = {n.rpartition(".")[0] for n, t in mean.items() if n in draw and _differs(t, draw[n])}
    drawn = False
    for name, _, _ in named_modules(model):
        if drawn and name in norms:
            return name
        drawn = drawn or name in varies
    return None


def _differs(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ, wherever they are."""
    return not torch.equal(one, other.to(one.device))


def _reached(norms: Iterable[str], statistics: Weights) -> Weights:
    """Return the statistics of the layers that the data reached; an auxiliary head keeps its own."""
    reached = {name for name in norms if int(statistics[f"{name}.num_batches_tracked"])}
    if not reached:
        raise ValueError(
            "the loader has no batches: batch norm needs data to re-estimate its statistics"
        )
    return {n: t.clone() for n, t in statistics.items() if n.rpartition(".")[0] in reached}
