"""The linear layer that gives a network's outputs, and the features that it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchbayes.core.batch import Inputs, call

__all__ = ["find_last_layer", "with_features"]


def find_last_layer(model: nn.Module, layer: str | None = None) -> tuple[str, nn.Linear]:
    """Return the name and the module of the linear layer that gives the outputs of `model`.

    Args:
        model: The network.
        layer: Name of the layer; the last `nn.Linear` in the order of `model.named_modules()` if None.

    Raises:
        ValueError: If there is none, or its weights are another layer's as well.

    Example:
        >>> from torch import nn
        >>> find_last_layer(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3)))[0]
        '2'
    """
    modules = dict(model.named_modules())
    if layer is None:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError(
                f"{type(model).__name__} has no linear layer whose weights could get a posterior: end the "
                "network with an nn.Linear"
            )
        layer = linear[-1]
    found = modules.get(layer)
    if not isinstance(found, nn.Linear):
        what = "no module" if found is None else f"a {type(found).__name__}, not an nn.Linear,"
        raise ValueError(
            f"{type(model).__name__} has {what} called {layer!r}: name the linear layer that gives the "
            "outputs, see model.named_modules()"
        )
    if parametrize.is_parametrized(found):
        raise ValueError(
            f"the weight of the last layer {layer!r} is computed from other parameters: remove the "
            "parametrization first (torch.nn.utils.parametrize.remove_parametrizations)"
        )
    own = {id(p) for p in found.parameters(recurse=False)}
    for prefix, module in modules.items():
        for leaf, p in module._parameters.items():
            if module is not found and id(p) in own:
                raise ValueError(
                    f"the last layer {layer!r} shares its weight with {f'{prefix}.{leaf}'.lstrip('.')!r}: a "
                    "posterior of the last layer needs weights of its own, so untie them or name another "
                    "layer in layer=…"
                )
    return layer, found


def with_features(
    model: nn.Module, name: str, layer: nn.Linear, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    """Run `model` and return the features that its last layer is given, and the outputs of that layer.

    Args:
        model: The network.
        name: Name of the last layer, for messages.
        layer: The last layer.
        inputs: A batch of the network's inputs.

    Raises:
        ValueError: If the outputs of the network are not those of this layer.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> None:
        seen.append((args[0], outputs))

    handle = layer.register_forward_hook(keep)
    try:
        result = call(model, inputs)
    finally:
        handle.remove()
    if len(seen) != 1:
        raise ValueError(
            f"layer {name!r} ran {len(seen)} times in one pass through {type(model).__name__}: name the "
            "linear layer that gives its outputs in layer=…"
        )
    features, outputs = seen[0]
    if result is not outputs and not _same(result, outputs):
        raise ValueError(
            f"the outputs of {type(model).__name__} are not those of its layer {name!r}: name the linear "
            "layer that gives them in layer=…, and leave a softmax or another function of them to the "
            "likelihood"
        )
    return features, outputs


def _same(result: Any, outputs: Tensor) -> bool:
    """Whether a network has returned a layer's outputs, perhaps in another shape."""
    if not isinstance(result, Tensor) or result.numel() != outputs.numel():
        return False
    return torch.equal(result.detach().reshape(outputs.shape), outputs.detach())
