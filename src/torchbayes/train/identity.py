"""What a resumed run is compared with besides its settings: the data, the network and the likelihood.

Of data and networks a run folder keeps digests, of a likelihood what it says of itself. Weights are no part
of it, as a run goes on with those of its checkpoint, nor is what the network's code computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from torchbayes.core.digest import digest
from torchbayes.data.folder import ImageFolder
from torchbayes.data.order import EpochLoader
from torchbayes.likelihood import Likelihood
from torchbayes.likelihood.observation import Observation

__all__ = ["data_checksum", "identity_settings", "likelihood_settings", "network_checksum"]

_PLAIN = (bool, int, float, str)
_CONTENT = (
    Tensor,
    bytes,
    type(None),
    *_PLAIN,
)  # what other objects print may be an address, or a shape
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def identity_settings(
    model: nn.Module, likelihood: Likelihood, loader: EpochLoader, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what config.toml holds of them.

    Args:
        model: The network, before it is trained.
        likelihood: The likelihood, likewise.
        loader: Loader of the training set.
        given: The caller's own, which stand in place of these.
    """
    made: dict[str, Callable[[], Any]] = {
        "data_checksum": lambda: data_checksum(loader),
        "network_checksum": lambda: network_checksum(model),
        "likelihood": lambda: likelihood_settings(likelihood),
    }
    return {name: make() for name, make in made.items() if name not in given}


def data_checksum(loader: EpochLoader) -> str | None:
    """Return a digest of a training set in memory or of a folder of images, or None for any other."""
    held = [getattr(loader, name, None) for name in ("inputs", "targets", "weights")]
    if held[0] is not None:
        leaves = tree_leaves(held, is_leaf=lambda leaf: leaf is None)
        return digest(held) if all(isinstance(leaf, _CONTENT) for leaf in leaves) else None
    source = getattr(loader, "dataset", None) or getattr(
        getattr(loader, "source", None), "dataset", None
    )
    if isinstance(source, TensorDataset):
        return digest(source.tensors)
    return source.digest() if isinstance(source, ImageFolder) else None


def network_checksum(model: nn.Module) -> str:
    """Return a digest of a network as it prints itself, and of its weights' names, shapes and types."""
    weights = [
        f"{name} {tuple(weight.shape)} {weight.dtype} {weight.requires_grad}"
        for name, weight in model.named_parameters()
    ]
    return digest(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(model)), weights)


def likelihood_settings(likelihood: Likelihood) -> dict[str, Any]:
    """Return the kind of a likelihood, its arguments and plain attributes, and the tensors that are fixed."""
    found: dict[str, Any] = {"kind": type(likelihood).__name__}
    if type(likelihood) is Observation:
        found["function"] = getattr(likelihood._of, "__name__", None)
    for name, value in vars(likelihood).items():
        if name not in _OF_EVERY_MODULE and name[0] != "_" and type(value) in _PLAIN:
            found[name] = value
    found |= likelihood.arguments() or {}
    fixed = {n: p for n, p in likelihood.named_parameters() if not p.requires_grad}
    for name, tensor in (fixed | dict(likelihood.named_buffers())).items():
        number = tensor.numel() == 1 and not tensor.is_complex() and bool(tensor.isfinite())
        found[name] = tensor.item() if number else digest(tensor)
    return found
