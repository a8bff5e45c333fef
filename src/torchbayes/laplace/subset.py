"""Which weights a Laplace posterior is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchbayes.core.names import named_parameters
from torchbayes.core.parameters import selected, trainable
from torchbayes.laplace.network import Network

__all__ = ["last_layer", "subset_names"]

Subset = str | nn.Module | Sequence[str | nn.Module]


def subset_names(network: Network, subset: Subset, inputs: Any) -> list[str]:
    """Name the weights that a `subset` argument denotes, in the order of the network.

    Args:
        network: The network.
        subset: `"all"` (the trainable ones), `"last_layer"`, or what a method's `params` takes: a module,
            the name of a module or weight, a pattern such as `"layer4.*"`, or a sequence of them.
        inputs: Inputs, to find the last layer.

    Raises:
        ValueError: If it denotes no weight; the message suggests a name.
    """
    model = network.model
    given = [subset] if isinstance(subset, (str, nn.Module)) else list(subset)
    found: set[str] = set()
    for each in given:
        if each == "all":
            found |= trainable(model).keys()
        elif each == "last_layer":
            found |= set(last_layer(network, inputs))
        else:
            found |= selected(model, each, argument="subset").keys()
    if not found:
        raise ValueError(
            "subset is empty: name weights, patterns or modules, or leave it out for all"
        )
    return [name for name in named_parameters(model) if name in found]


@torch.no_grad()
def last_layer(network: Network, inputs: Any) -> list[str]:
    """Name the weights of the module with weights of its own that runs last.

    Where some weights are trained and others frozen, it is the last one with weights that are trained, and
    these of its weights.
    """
    model, ran = network.model, list[nn.Module]()
    parameters = named_parameters(model)
    chosen = {id(p) for p in parameters.values() if p.requires_grad} or set(
        map(id, parameters.values())
    )
    handles = [
        module.register_forward_hook(lambda m, _inputs, _outputs: ran.append(m))
        for module in model.modules()
        if any(id(p) in chosen for p in module._parameters.values())
    ]
    try:
        network(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise ValueError(
            f"{type(model).__name__} has no module with weights, so no last layer: name the weights in subset"
        )
    own = chosen & {id(p) for p in ran[-1]._parameters.values()}
    return [name for name, p in parameters.items() if id(p) in own]
