"""The linear layer that gives a network's outputs, and the features that it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchbayes.core.batch import Inputs, call, uncompiled
from torchbayes.core.names import named_parameters
from torchbayes.core.outputs import Output, output_tensor

__all__ = ["find_last_layer", "weight_names", "with_features"]


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


def weight_names(model: nn.Module, layer: nn.Linear) -> list[str]:
    """Return the names of a layer's weight and, if it has one, of its bias in `model`."""
    names = {id(p): name for name, p in named_parameters(model).items()}
    return [names[id(p)] for p in layer.parameters(recurse=False)]


def with_features(
    model: nn.Module, name: str, layer: nn.Linear, inputs: Inputs, output: Output = None
) -> tuple[Tensor, Tensor]:
    """Run `model` and return the features that its last layer is given, and the outputs of that layer.

    Args:
        model: The network.
        name: Name of the last layer, for messages.
        layer: The last layer.
        inputs: A batch of the network's inputs.
        output: Where the outputs are in what the network returns.

    Raises:
        ValueError: If the outputs of the network are not those of this layer.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> None:
        seen.append((args[0], outputs))

    handle = layer.register_forward_hook(keep)
    try:
        with uncompiled():  # the compiler does not look for new hooks
            returned = call(model, inputs)
    finally:
        handle.remove()
    if len(seen) != 1:
        raise ValueError(
            f"layer {name!r} ran {len(seen)} times in one pass through {type(model).__name__}: name the "
            "linear layer that gives its outputs in layer=…"
        )
    features, outputs = seen[0]
    result = output_tensor(returned, output, network=type(model).__name__)
    if result is not outputs and not _same(result, outputs):
        raise ValueError(
            f"the outputs of {type(model).__name__} are not those of its layer {name!r}: name the linear "
            "layer that gives them in layer=…, and leave a softmax or another function of them to the "
            "likelihood"
        )
    return features, outputs


def _same(result: Tensor, outputs: Tensor) -> bool:
    """Whether a network has returned a layer's outputs, perhaps in another shape."""
    if result.numel() != outputs.numel():
        return False
    return torch.equal(result.detach().reshape(outputs.shape), outputs.detach())
