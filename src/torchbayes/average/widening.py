"""Widening: N times the channels inside the residual blocks (Ukai et al. 2019, section 3.4).

Every kernel becomes N×N tiles, each a draw of its own, scaled by 1/N: a channel then sums over N copies of
its inputs what it summed over one. The paper does not mention the factor. Batch norm absorbs it after a
block's first convolution, but what is added to the shortcut would be N times too large without it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from torchbayes.average.freeze import freeze, loaded, plain_network, recalibrated, take_draws
from torchbayes.average.parallelizing import blocks_of, replace
from torchbayes.core.batch import arguments, map_tensors, split_batch, to_device
from torchbayes.posterior import Posterior, Weights

__all__ = ["MergeChannels", "RepeatChannels", "widening"]


class RepeatChannels(nn.Module):
    """The channels several times, one copy after the other.

    Args:
        times: How often.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Repeat dimension 1."""
        return torch.cat([x] * self.times, 1)


class MergeChannels(nn.Module):
    """The average of the copies that `RepeatChannels` began.

    Args:
        times: The number of copies.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Average over the copies in dimension 1."""
        merged: Tensor = x.unflatten(1, (self.times, -1)).mean(1)
        return merged


def widening(
    model: nn.Module,
    posterior: Posterior,
    times: int,
    loader: Iterable[Any] | None = None,
    *,
    blocks: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """A network with N times the channels in its blocks: the averaging of the layer-wise strategy.

    The stem's output is repeated N times and the copies are averaged after the last block. Takes N²
    draws, one for each tile of the kernels. Every copy of a channel has its own batch norm.

    Args:
        model: The network, or the wrapper that it was trained in: of blocks one after the other that do
            nothing with channels but convolve (without groups) and normalise them.
        posterior: Where the weights are drawn from.
        times: The factor N.
        loader: Training data for the batch-norm statistics, re-estimated in the new network.
        blocks: The names of the residual blocks; found as `Hypernet` finds them if not given.
        generator: The source of the draws.

    Raises:
        ValueError: If the network cannot be widened.

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.models import wide_resnet
        >>> net = tb.Hypernet(wide_resnet(10, 1), "layer-wise")
        >>> wide = tb.average.widening(net, net.posterior(), 2, [torch.randn(8, 3, 16, 16)])
        >>> wide.layer2[0].conv2
        Conv2d(64, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    network = plain_network(model)
    posterior.check(network)
    names = blocks_of(network, blocks, "widened")
    _check_layers(network, names)
    draws = take_draws(posterior, times * times, generator)
    if times == 1:
        return freeze(network, draws[0], loader)
    if loader is not None:
        same = _widened(network, [draws[0]] * (times * times), times, names)
        _check_same(network, draws[0], same, loader)
    return recalibrated(_widened(network, draws, times, names), loader)


def _check_layers(network: nn.Module, names: list[str]) -> None:
    for block in names:
        for leaf, module in network.get_submodule(block).named_modules():
            if isinstance(module, _ConvNd) and (module.groups > 1 or module.transposed):
                raise _refusal(network, f"{block}.{leaf} is a grouped or transposed convolution")
            plain = isinstance(module, (_ConvNd, _BatchNorm))
            if not plain and any(True for _ in module.parameters(recurse=False)):
                raise _refusal(network, f"{block}.{leaf} is a {type(module).__name__}")


def _refusal(network: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"{type(network).__name__} cannot be widened: {why}; use branching or parallelizing"
    )


def _widened(
    network: nn.Module, draws: Sequence[Weights], times: int, names: list[str]
) -> nn.Module:
    result = loaded(network, draws[0])
    with torch.no_grad():
        for block in names:
            for leaf, module in result.get_submodule(block).named_modules():
                if isinstance(module, _ConvNd):
                    _widen_kernel(module, f"{block}.{leaf}", draws, times)
                elif isinstance(module, _BatchNorm):
                    _widen_norm(module, times)
    # The first block repeats what comes in, the last one merges what goes out.
    first, last = (result.get_submodule(name) for name in (names[0], names[-1]))
    if first is last:
        replace(result, names[0], nn.Sequential(RepeatChannels(times), first, MergeChannels(times)))
    else:
        replace(result, names[0], nn.Sequential(RepeatChannels(times), first))
        replace(result, names[-1], nn.Sequential(last, MergeChannels(times)))
    return result.eval()


def _widen_kernel(module: _ConvNd, name: str, draws: Sequence[Weights], times: int) -> None:
    rows = [
        torch.cat([draws[row * times + column][f"{name}.weight"] for column in range(times)], 1)
        for row in range(times)
    ]
    module.weight = nn.Parameter(torch.cat(rows).div(times).to(module.weight))
    if module.bias is not None:
        bias = [draws[row * times][f"{name}.bias"] for row in range(times)]
        module.bias = nn.Parameter(torch.cat(bias).to(module.bias))
    module.in_channels *= times
    module.out_channels *= times


def _widen_norm(module: _BatchNorm, times: int) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        module.register_parameter(name, nn.Parameter(parameter.repeat(times)))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dim() == 1:
            module.register_buffer(name, buffer.repeat(times))
    module.num_features *= times


@torch.no_grad()
def _check_same(
    network: nn.Module, draw: Weights, widened: nn.Module, loader: Iterable[Any]
) -> None:
    """Widened with one draw in all tiles, a network has to be what it was: try it on two examples."""
    batch = next(iter(loader), None)
    if batch is None:
        return  # re-estimation will say so
    device = next(p.device for p in network.parameters())
    inputs = map_tensors(split_batch(batch)[0], lambda tensor: tensor[:2])
    args, kwargs = arguments(to_device(inputs, device))
    narrow = copy.deepcopy(network).eval()
    expected = torch.func.functional_call(narrow, draw, args, kwargs)
    try:
        same = torch.allclose(widened(*args, **kwargs), expected, rtol=1e-2, atol=1e-3)
    except RuntimeError as error:
        same = False
        if "out of memory" in str(error):
            raise
    if not same and math.isfinite(float(expected.sum())):
        raise _refusal(network, "its blocks do more with channels than convolve and normalise them")
