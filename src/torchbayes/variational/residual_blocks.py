"""Finding the residual blocks of a network, and the weights in them that a hypernetwork generates.

A *block* is an element of an `nn.Sequential` or `nn.ModuleList` that is neither of the two itself and
contains at least two convolutions, but no smaller block: residual networks build their stages from these.
Blocks are found by the shape of the module tree alone, so for a network that is built in another way they
must be named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.conv import _ConvNd

from torchbayes.core.names import named_modules
from torchbayes.core.parameters import Params, norm_parameters, selected, trainable

__all__ = ["default_layers", "find_blocks", "latent_groups", "named_layers"]

_LOG = logging.getLogger("torchbayes")
_LISTS = (nn.Sequential, nn.ModuleList)


def find_blocks(model: nn.Module, named: Iterable[str] | None = None) -> list[str]:
    """Return the names of the residual blocks of `model`, in the order of its modules.

    Args:
        model: The network.
        named: Names of the blocks, if known; they only need to exist.

    Example:
        >>> from torchbayes.models import wide_resnet
        >>> find_blocks(wide_resnet(10, 1))
        ['layer1.0', 'layer2.0', 'layer3.0']
    """
    modules = _modules(model)
    if named is not None:
        names = [named] if isinstance(named, str) else list(named)
        for name in names:
            if name not in modules or not name:
                raise ValueError(
                    f"{type(model).__name__} has no block {name!r}: see model.named_modules()"
                )
        return names
    found = [
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, module in modules.items()
        if isinstance(module, _LISTS)
        for leaf, child in module.named_children()
        if not isinstance(child, _LISTS)
        and sum(isinstance(m, _ConvNd) for m in child.modules()) > 1
    ]
    inner = [n for n in found if not any(other.startswith(f"{n}.") for other in found)]
    return [name for name in modules if name in inner]


def named_layers(model: nn.Module, layers: Params) -> list[str]:
    """Return the weights that names refer to; patterns and layers, those of two or more dimensions.

    Raises:
        ValueError: If a name does not exist, or refers to no trainable weight.
    """
    own = trainable(model)
    others = own.keys() - set(_matrices(model))
    return list(selected(model, layers, others, frozen=False, argument="layers"))


def default_layers(model: nn.Module, blocks: list[str]) -> list[str]:
    """Return the convolutions in the blocks; without blocks, all matrices and kernels except the last."""
    matrices = _matrices(model)
    owners = {f"{prefix}.weight" for prefix, m in _modules(model).items() if isinstance(m, _ConvNd)}
    inside = [n for n in matrices if any(n.startswith(f"{block}.") for block in blocks)]
    if inside:
        return [n for n in inside if n in owners] or inside
    if not matrices:
        raise ValueError(
            f"{type(model).__name__} has no trainable matrices or kernels to generate: name some weights in "
            "layers=…"
        )
    last = matrices[-1].rpartition(".")[0]
    rest = [n for n in matrices if n.rpartition(".")[0] != last] or matrices
    message = "%s has no residual blocks: the hypernetwork generates %s"
    _LOG.info(message, type(model).__name__, ", ".join(rest))
    return rest


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {short: module for short, _, module in named_modules(model)}


def _matrices(model: nn.Module) -> list[str]:
    """Return the names of trainable weights of two or more dimensions, except norms and embeddings."""
    tables = {f"{p}.weight" for p, m in _modules(model).items() if isinstance(m, nn.Embedding)}
    left_out = norm_parameters(model) | tables
    return [
        name
        for name, p in trainable(model).items()
        if p.dim() > 1 and p.is_floating_point() and name not in left_out
    ]


def latent_groups(names: list[str], blocks: list[str], strategy: str) -> dict[str, str]:
    """Return the name of every weight's latent: one for all, one per block or one per layer.

    In the block-wise strategy each weight outside the blocks has its own latent.
    """
    if strategy == "all-in-one":
        return dict.fromkeys(names, "all")
    if strategy == "layer-wise":
        return {name: name for name in names}
    return {
        name: next((block for block in blocks if name.startswith(f"{block}.")), name)
        for name in names
    }
