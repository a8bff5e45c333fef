"""Parallelizing: N copies of every residual block, their outputs averaged (Ukai et al. 2019, section 3.4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.average.freeze import loaded, plain_network, recalibrated, take_draws
from torchbayes.posterior import Posterior
from torchbayes.variational.residual_blocks import find_blocks

__all__ = ["Parallel", "parallelizing"]


class Parallel(nn.Module):
    """Blocks whose outputs are averaged.

    Args:
        blocks: The blocks.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """The average of the blocks' outputs."""
        return torch.stack([block(x) for block in self.blocks]).mean(0)


def parallelizing(
    model: nn.Module,
    posterior: Posterior,
    times: int,
    loader: Iterable[Any] | None = None,
    *,
    blocks: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """A network with N drawn copies of every residual block: the averaging of the block-wise strategy.

    What is outside of the blocks is the first draw's. Every copy has its own batch norm.

    Args:
        model: The network, or the wrapper that it was trained in.
        posterior: Where the weights are drawn from.
        times: The number N of copies.
        loader: Training data for the batch-norm statistics, re-estimated in the new network.
        blocks: The names of the residual blocks; found as `Hypernet` finds them if not given.
        generator: The source of the draws.

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.models import wide_resnet
        >>> net = tb.Hypernet(wide_resnet(10, 1), "block-wise")
        >>> wide = tb.average.parallelizing(net, net.posterior(), 2, [torch.randn(8, 3, 16, 16)])
        >>> type(wide.layer1[0]).__name__, wide(torch.zeros(2, 3, 16, 16)).shape
        ('Parallel', torch.Size([2, 10]))
    """
    network = plain_network(model)
    posterior.check(network)
    names = blocks_of(network, blocks, "parallelized")
    draws = take_draws(posterior, times, generator)
    networks = [loaded(network, draw) for draw in draws]
    result = networks[0]
    for name in names:
        replace(result, name, Parallel([n.get_submodule(name) for n in networks]))
    return recalibrated(result, loader)


def blocks_of(network: nn.Module, named: Iterable[str] | None, verb: str) -> list[str]:
    """The names of the blocks, of which there has to be one."""
    names = find_blocks(network, named)
    if not names:
        raise ValueError(
            f"{type(network).__name__} cannot be {verb}: it has no residual blocks; name them in blocks=… or "
            "use branching"
        )
    return names


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place that has that name."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._modules[leaf] = module
