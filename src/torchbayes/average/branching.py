"""Branching: N networks side by side, averaged at their outputs (Ukai et al. 2019, section 3.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.average.freeze import freeze, plain_network, take_draws
from torchbayes.posterior import Generated, Posterior

__all__ = ["Branches", "branching"]


class Branches(nn.Module):
    """Networks whose outputs are averaged.

    Args:
        networks: The networks.
        probabilities: Average class probabilities and give their logarithms, instead of averaging logits.
    """

    def __init__(self, networks: Iterable[nn.Module], probabilities: bool = False) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.probabilities = probabilities

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The average of the networks' outputs."""
        outputs = torch.stack([network(*args, **kwargs) for network in self.networks])
        if self.probabilities:
            return outputs.log_softmax(-1).logsumexp(0) - math.log(len(outputs))
        return outputs.mean(0)


def branching(
    model: nn.Module,
    posterior: Posterior,
    times: int,
    loader: Iterable[Any] | None = None,
    *,
    probabilities: bool = False,
    generator: torch.Generator | None = None,
) -> Branches:
    """N draws as N networks side by side: the averaging of the all-in-one strategy.

    Args:
        model: The network, or the wrapper that it was trained in.
        posterior: Where the weights are drawn from.
        times: The number N of networks.
        loader: Training data for the batch-norm statistics of every network, gone through N times. An
            ensemble's members have theirs already.
        probabilities: Average class probabilities (Bayesian model averaging) and give their logarithms.
            The paper averages logits, as is the default.
        generator: The source of the draws.

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.models import mlp
        >>> net = tb.Hypernet(mlp(4, hidden=(8, 8)))
        >>> tb.average.branching(net, net.posterior(), 4)(torch.zeros(2, 4)).shape
        torch.Size([2, 10])
    """
    network = plain_network(model)
    posterior.check(network)
    # The members of an ensemble come with statistics of their own.
    own = not isinstance(posterior, Generated)
    draws = take_draws(posterior, times, generator)
    networks = [freeze(network, d, loader, keep_statistics=own and loader is None) for d in draws]
    return Branches(networks, probabilities).eval()
