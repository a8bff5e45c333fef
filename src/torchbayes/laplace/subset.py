"""Which weights a Laplace posterior is over."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.batch import call
from torchbayes.core.names import named_modules, named_parameters

__all__ = ["last_layer", "subset_names"]

Subset = str | nn.Module | Sequence[str | nn.Module]


def subset_names(model: nn.Module, subset: Subset, inputs: Any) -> list[str]:
    """Name the weights that a `subset` argument denotes.

    Args:
        model: The network.
        subset: `"all"` (the trainable ones), `"last_layer"`, a module, the name of a module or of a weight,
            a pattern such as `"layer4.*"`, or a sequence of them.
        inputs: Inputs, to find the last layer.

    Raises:
        ValueError: If it denotes no weight; the message suggests a name.
    """
    given = [subset] if isinstance(subset, (str, nn.Module)) else list(subset)
    found: set[str] = set()
    for each in given:
        found |= set(_names(model, each, inputs))
    names = [name for name in named_parameters(model) if name in found]
    if not names:
        raise ValueError(
            f"subset={subset!r} has no weights of {type(model).__name__}: name some of "
            "dict(model.named_parameters())"
        )
    return names


def _names(model: nn.Module, subset: str | nn.Module, inputs: Any) -> Iterable[str]:
    parameters = named_parameters(model)
    if isinstance(subset, nn.Module):
        own = {id(p) for p in subset.parameters()}
        found = [name for name, p in parameters.items() if id(p) in own]
        if not found:
            raise ValueError(
                f"subset has a {type(subset).__name__} with no weights of {type(model).__name__}: pass "
                "modules of the network itself"
            )
        return found
    if subset == "all":
        return [name for name, p in parameters.items() if p.requires_grad]
    if subset == "last_layer":
        return last_layer(model, inputs)
    found = [n for n in parameters if n.startswith(f"{subset}.") or fnmatchcase(n, subset)]
    if not found:
        modules = [short for short, _, _ in named_modules(model) if short]
        known = ["all", "last_layer", *modules, *parameters]
        close = difflib.get_close_matches(subset, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"subset {subset!r} is neither all, last_layer nor the name of a module or weight of "
            f"{type(model).__name__}{hint or ': see model.named_parameters()'}"
        )
    return found


@torch.no_grad()
def last_layer(model: nn.Module, inputs: Any) -> list[str]:
    """Name the weights of the module with weights of its own that runs last."""
    ran: list[nn.Module] = []
    handles = [
        module.register_forward_hook(lambda m, _inputs, _outputs: ran.append(m))
        for module in model.modules()
        if any(isinstance(p, Tensor) for p in module._parameters.values())
    ]
    try:
        call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise ValueError(
            f"{type(model).__name__} has no module with weights, so no last layer: name the weights in subset"
        )
    own = {id(p) for p in ran[-1]._parameters.values() if p is not None}
    return [name for name, p in named_parameters(model).items() if id(p) in own]
