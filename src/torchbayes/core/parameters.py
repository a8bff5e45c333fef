"""The parameters of a module that a method may be uncertain about."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["norm_parameters", "trainable"]

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` that require a gradient, tied ones once.

    Raises:
        ValueError: If there are none.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no trainable weights: set requires_grad on some of its parameters"
        )
    return parameters


def norm_parameters(model: nn.Module) -> set[str]:
    """Return the names of the scales and shifts of norm layers, which methods keep deterministic."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NORMS)
        for name, _ in module.named_parameters(recurse=False)
    }
