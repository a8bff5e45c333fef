"""Our optimisers in other people's hands: made by a trainer, and found again inside its wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torchbayes.optim.base import ModelOptimizer

__all__ = ["made_optimizer", "only_optimizer", "own_optimizer"]


def made_optimizer(
    make: Callable[..., torch.optim.Optimizer], model: nn.Module, size: Callable[[], int],
    options: dict[str, Any],
) -> torch.optim.Optimizer:  # fmt: skip
    """Make an optimiser: ours from the model and the number of examples, torch's from the parameters.

    Args:
        make: A class of `torchbayes.optim` or `torch.optim`, or a function of the model.
        model: The network.
        size: Returns the number of training examples; called if it is needed.
        options: Options of the optimiser.
    """
    if isinstance(make, type) and not issubclass(make, ModelOptimizer):
        trained = [p for p in model.parameters() if p.requires_grad]
        return make(trained, **options)  # type: ignore[call-arg, return-value]
    if "train_size" in inspect.signature(make).parameters and "train_size" not in options:
        options = options | {"train_size": size()}
    return make(model, **options)


def own_optimizer(optimizer: Any) -> Any:
    """Return the optimiser inside the wrappers of accelerate and Lightning."""
    while not isinstance(optimizer, ModelOptimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            return optimizer
        optimizer = inner
    return optimizer


def only_optimizer(optimizers: Iterable[Any]) -> ModelOptimizer:
    """Return the one of a trainer's optimisers that is ours, inside its wrappers.

    Raises:
        ValueError: If there is none, or more than one.
    """
    found = [o for o in map(own_optimizer, optimizers) if isinstance(o, ModelOptimizer)]
    if len(found) != 1:
        raise ValueError(
            f"the trainer has {len(found)} optimisers of torchbayes, and the posterior is that of one: pass "
            "source=, the optimiser, averager or wrapper that it comes from"
        )
    return found[0]
