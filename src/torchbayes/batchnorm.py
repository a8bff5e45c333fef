"""Batch-norm statistics for weights that were drawn or averaged."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.data.batch import arguments, split_batch, to_device
from torchbayes.posterior import Weights, Wrapper

__all__ = ["recalibrate_batchnorm"]


def recalibrate_batchnorm(model: nn.Module, weights: Weights, loader: Iterable[Any]) -> Weights:
    """Re-estimate batch-norm statistics for weights that were drawn or averaged, not trained.

    The running mean and variance of every batch-norm layer become the averages over all batches of
    `loader` under `weights`. Dropout is off. The model itself is not touched.

    Args:
        model: The network.
        weights: The weights to use in it.
        loader: Batches of training data: inputs, or pairs of inputs and targets.

    Returns:
        `weights` with the statistics added or replaced; without batch norm, `weights` as they are.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> new = tb.recalibrate_batchnorm(model, tb.snapshot(model), [torch.randn(64, 2) + 5])
        >>> bool((new["1.running_mean"] != model[1].running_mean).all())
        True
    """
    if isinstance(model, Wrapper):
        model = model.model
    twin = copy.deepcopy(model).eval()
    norms = {
        name: module
        for name, module in twin.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }
    if not norms:
        return dict(weights)
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average, every batch counting the same
        norm.training = True
    statistics = {
        f"{name}.{buffer}": getattr(norm, buffer)
        for name, norm in norms.items()
        for buffer in ("running_mean", "running_var", "num_batches_tracked")
    }
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    used = {name: tensor.to(device) for name, tensor in weights.items()} | statistics
    with torch.no_grad():
        for batch in loader:
            args, kwargs = arguments(to_device(split_batch(batch)[0], device))
            torch.func.functional_call(twin, used, args, kwargs)
    if not any(int(t) for name, t in statistics.items() if name.endswith("num_batches_tracked")):
        raise ValueError(
            "the loader has no batches: batch norm needs data to re-estimate its statistics"
        )
    # A layer that the data did not reach, such as an auxiliary head, keeps what it had.
    reached = {
        name for name, norm in norms.items() if int(statistics[f"{name}.num_batches_tracked"])
    }
    return dict(weights) | {
        name: tensor.clone()
        for name, tensor in statistics.items()
        if name.rpartition(".")[0] in reached
    }
