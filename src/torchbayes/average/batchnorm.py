"""Draws of a posterior with batch-norm statistics of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchbayes.posterior import Posterior, Samples, Wrapper
from torchbayes.predict.batchnorm import recalibrate_batchnorm

__all__ = ["recalibrated_samples"]


def recalibrated_samples(
    model: nn.Module,
    posterior: Posterior,
    loader: Iterable[Any],
    samples: int = 30,
    *,
    generator: torch.Generator | None = None,
    folder: str | Path | None = None,
) -> Samples:
    """Draw weights and give each draw the batch-norm statistics that the training data have under it.

    A posterior's draws share the statistics of its mean. With batch norm that is an approximation; the
    SWAG paper re-estimates them for every draw, at the price of one pass over `loader` each.

    Args:
        model: The network, or the wrapper that it was trained in.
        posterior: Where the weights are drawn from.
        loader: Batches of training data; gone through once per draw, so not an exhaustible iterator.
        samples: The number of draws (the SWAG paper: 30).
        generator: The source of the draws.
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
    network = model.model if isinstance(model, Wrapper) else model
    posterior.check(network)
    bank = Samples(network, folder=folder)
    for draw in posterior.draws(samples, generator):
        bank.append(recalibrate_batchnorm(network, draw, loader))
    return bank
