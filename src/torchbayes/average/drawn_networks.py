"""Networks of drawn weights, averaged in three ways (Ukai et al. 2019, section 3.4).

Branching puts N networks side by side and averages their outputs; parallelizing does so with the residual
blocks; widening gives the blocks N times the channels. When widening, every kernel becomes N×N tiles, each a
draw of its own, scaled by 1/N: a channel then sums over N copies of its inputs what it summed over one. The
paper does not mention the factor. Batch norm absorbs it after a block's first convolution, but what is added
to the shortcut would be N times too large without it.
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
from torchbayes.core.batch import arguments, map_tensors, split_batch, to_device
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.posterior import Generated, Posterior, Weights
from torchbayes.variational.residual_blocks import find_blocks

__all__ = [
    "Branches", "MergeChannels", "Parallel", "RepeatChannels", "branching", "parallelizing", "widening",
]  # fmt: skip


class Branches(nn.Module):
    """Average the outputs of several networks.

    Args:
        networks: The networks.
        probabilities: Return the logarithm of the average class probabilities instead of average logits.
        output: Where the tensor to average is in what a network returns: a key, an index or a function.
    """

    def __init__(
        self,
        networks: Iterable[nn.Module],
        probabilities: bool = False,
        output: Output = None,
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.probabilities, self.output = probabilities, output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the average of the networks' outputs."""
        each = [output_tensor(network(*args, **kwargs), self.output) for network in self.networks]
        outputs = torch.stack(each)
        if self.probabilities:
            return outputs.log_softmax(-1).logsumexp(0) - math.log(len(outputs))
        return outputs.mean(0)


def branching(
    model: nn.Module, posterior: Posterior, times: int, loader: Iterable[Any] | None = None, *,
    probabilities: bool = False, generator: torch.Generator | None = None, output: Output = None,
) -> Branches:  # fmt: skip
    """Put N drawn networks side by side: the averaging of the all-in-one strategy.

    Args:
        model: The network, or the wrapper it was trained in.
        posterior: Distribution to draw the weights from.
        times: Number N of networks.
        loader: Training data for the batch-norm statistics of every network, read N times. The members of
            an ensemble have theirs already.
        probabilities: Return the logarithm of the average class probabilities (Bayesian model averaging).
            The paper averages logits, which is the default.
        generator: Source of the draws.
        output: Where the tensor to average is in what the network returns; see `torchbayes.predictive`.

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
    return Branches(networks, probabilities, output).eval()


class Parallel(nn.Module):
    """Average the outputs of several blocks.

    Args:
        blocks: The blocks.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return the average of the blocks' outputs."""
        return torch.stack([block(x) for block in self.blocks]).mean(0)


def parallelizing(
    model: nn.Module, posterior: Posterior, times: int, loader: Iterable[Any] | None = None, *,
    blocks: Iterable[str] | None = None, generator: torch.Generator | None = None,
) -> nn.Module:  # fmt: skip
    """Build a network with N drawn copies of each residual block: the averaging of the block-wise strategy.

    Weights outside the blocks are those of the first draw. Every copy has its own batch norm.

    Args:
        model: The network, or the wrapper it was trained in.
        posterior: Distribution to draw the weights from.
        times: Number N of copies.
        loader: Training data for the batch-norm statistics, re-estimated in the new network.
        blocks: Names of the residual blocks; by default those that `Hypernet` finds.
        generator: Source of the draws.

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
    names = _blocks_of(network, blocks, "parallelized")
    networks = [loaded(network, draw) for draw in take_draws(posterior, times, generator)]
    result = networks[0]
    for name in names:
        _replace(result, name, Parallel([n.get_submodule(name) for n in networks]))
    return recalibrated(result, loader)


def _blocks_of(network: nn.Module, named: Iterable[str] | None, verb: str) -> list[str]:
    """Return the names of the blocks, of which there must be at least one."""
    names = find_blocks(network, named)
    if not names:
        raise ValueError(
            f"{type(network).__name__} cannot be {verb}: it has no residual blocks; name them in blocks=… or "
            "use branching"
        )
    return names


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of that name."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._modules[leaf] = module


class RepeatChannels(nn.Module):
    """Repeat the channels, one copy after another.

    Args:
        times: Number of copies.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Repeat dimension 1."""
        return torch.cat([x] * self.times, 1)


class MergeChannels(nn.Module):
    """Average the copies that `RepeatChannels` made.

    Args:
        times: Number of copies.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Average over the copies in dimension 1."""
        merged: Tensor = x.unflatten(1, (self.times, -1)).mean(1)
        return merged


def widening(
    model: nn.Module, posterior: Posterior, times: int, loader: Iterable[Any] | None = None, *,
    blocks: Iterable[str] | None = None, generator: torch.Generator | None = None,
) -> nn.Module:  # fmt: skip
    """Build a network with N times the channels in its blocks: the averaging of the layer-wise strategy.

    The stem's output is repeated N times and the copies are averaged after the last block. It takes
    N² draws, one for each tile of the kernels. Every copy of a channel has its own batch norm.

    Args:
        model: The network, or the wrapper it was trained in: a chain of blocks that do nothing to channels
            but convolve (without groups) and normalise them.
        posterior: Distribution to draw the weights from.
        times: Factor N.
        loader: Training data for the batch-norm statistics, re-estimated in the new network.
        blocks: Names of the residual blocks; by default those that `Hypernet` finds.
        generator: Source of the draws.

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
    names = _blocks_of(network, blocks, "widened")
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
    # The first block repeats its input, the last one merges its output.
    first, last = (result.get_submodule(name) for name in (names[0], names[-1]))
    repeat, merge = RepeatChannels(times), MergeChannels(times)
    if first is last:
        _replace(result, names[0], nn.Sequential(repeat, first, merge))
    else:
        _replace(result, names[0], nn.Sequential(repeat, first))
        _replace(result, names[-1], nn.Sequential(last, merge))
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
    """Check on two examples that widening with one draw in all tiles leaves the network unchanged."""
    batch = next(iter(loader), None)
    if batch is None:
        return  # re-estimation will report it
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
