"""Locate a training failure: the first layer whose output, or the first weight, is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchbayes.core.batch import call, uncompiled
from torchbayes.core.workspace import first_nonfinite

__all__ = ["SkippedStep", "TrainingError", "first_nonfinite_layer", "first_nonfinite_weight"]


class TrainingError(RuntimeError):
    """Training cannot continue.

    Attributes:
        step: Update at which it failed, from 0.
        layer: What is not finite.
    """

    def __init__(self, message: str, *, step: int, layer: str) -> None:
        super().__init__(message)
        self.step, self.layer = step, layer


class SkippedStep(Exception):
    """The gradient overflowed in float16: this update is skipped."""


def _finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(t).all())
        for t in tree_leaves(value)
        if isinstance(t, Tensor) and t.is_floating_point()
    )


def first_nonfinite_weight(module: nn.Module) -> str | None:
    """Return the name of the first parameter with a non-finite entry, or None."""
    named = [(n, p) for n, p in module.named_parameters() if p.is_floating_point()]
    bad = first_nonfinite([p.detach() for _, p in named])
    return None if bad is None else named[bad][0]


def first_nonfinite_layer(module: nn.Module, inputs: Any) -> str:
    """Run the network once more and describe where the first non-finite value appears."""
    if not _finite(inputs):
        return "the inputs have a non-finite value"
    weight = first_nonfinite_weight(module)
    if weight is not None:
        return f"weight {weight!r} is not finite"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if not found and not _finite(outputs):
                found.append(name)

        return hook

    leaves = [(n, m) for n, m in module.named_modules() if n and not any(m.children())]
    handles = [m.register_forward_hook(look(n)) for n, m in leaves]
    try:
        with torch.no_grad(), uncompiled():
            call(module, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return f"layer {found[0]!r} gives non-finite outputs" if found else "the loss itself overflows"
