"""Turn a draw of the weights into a plain network that does not know where its weights came from."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.posterior import Generated, Posterior, Weights
from torchbayes.posterior.posterior import assign, plain_network
from torchbayes.predict.batchnorm import recalibrate_batchnorm

__all__ = ["freeze", "has_batchnorm", "loaded", "plain_network", "recalibrated", "take_draws"]


def freeze(
    model: nn.Module, weights: Weights, loader: Iterable[Any] | None = None, *,
    keep_statistics: bool = False,
) -> nn.Module:  # fmt: skip
    """Return a copy of the network with the given weights, in evaluation mode.

    Args:
        model: The network, or the wrapper it was trained in.
        weights: A draw, such as `net.posterior().sample()`.
        loader: Training data to re-estimate batch-norm statistics on (section 3.5 of the hypernetwork
            paper); not needed without batch norm.
        keep_statistics: Use the draw's own statistics instead, such as those of an ensemble's member.

    Raises:
        ValueError: If the network has batch norm and there is no data for it.

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.models import mlp
        >>> net = tb.Hypernet(mlp(4, hidden=(8, 8)))
        >>> plain = tb.average.freeze(net, net.posterior().sample())
        >>> type(plain).__name__, plain(torch.zeros(2, 4)).shape
        ('MLP', torch.Size([2, 10]))
    """
    twin = loaded(plain_network(model), weights)
    return twin.eval() if keep_statistics else recalibrated(twin, loader)


def loaded(model: nn.Module, weights: Weights) -> nn.Module:
    """Return a copy of the network with the given weights and buffers."""
    twin = copy.deepcopy(model)
    assign(twin, weights)
    return twin


def has_batchnorm(model: nn.Module) -> bool:
    """Whether a network has batch norm with running statistics."""
    return any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules())


@torch.no_grad()
def recalibrated(model: nn.Module, loader: Iterable[Any] | None) -> nn.Module:
    """Re-estimate the network's batch-norm statistics in place; return it in evaluation mode."""
    if has_batchnorm(model):
        if loader is None:
            raise ValueError(
                f"{type(model).__name__} has batch norm, whose statistics must be re-estimated for drawn "
                "weights: pass a loader of training data"
            )
        assign(model, recalibrate_batchnorm(model, {}, loader))
    return model.eval()


def take_draws(
    posterior: Posterior, count: int, generator: torch.Generator | None
) -> list[Weights]:
    """Return exactly `count` draws: new ones of a hypernetwork, each member once of a finite posterior."""
    if count < 1:
        raise ValueError(f"times is {count}: expected at least 1")
    if isinstance(posterior, Generated):
        return [posterior.sample(generator) for _ in range(count)]
    draws = list(posterior.draws(count, generator))
    if len(draws) < count:
        raise ValueError(
            f"{count} draws are needed but {posterior!r} has only {len(draws)} of them: average fewer"
        )
    return draws
