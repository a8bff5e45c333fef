"""DDP in front of an optimiser with noise of its own: noticed where the forward pass goes through it.

`DistributedDataParallel` averages the gradients of all processes. Where each of them draws weights or noise
of its own, these are gradients at different weights, and chains would leave each other without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchbayes.core import distributed

__all__ = ["AveragingGuard", "Drawing"]


class Drawing(Protocol):
    """An optimiser that knows whether its processes have different weights now."""

    def draws_apart(self) -> bool:
        """Whether the processes' weights differ, because each has draws or noise of its own."""


class AveragingGuard:
    """A forward pre-hook that raises a `RuntimeError` if DDP calls a module at weights that differ.

    It does nothing once its optimiser is gone, and in copies of the module.

    Args:
        optimizer: The optimiser of the module's weights.
    """

    def __init__(self, optimizer: Drawing | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def watch(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        """Hook every module that owns some of the parameters, whatever calls it, and every DDP inside."""
        own = set(map(id, parameters))
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) or any(
                id(p) in own for p in module.parameters(recurse=False)
            ):
                module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, _args: Any) -> None:
        """Check one forward pass."""
        active = DistributedDataParallel._active_ddp_module
        if active is None and not isinstance(module, DistributedDataParallel):
            return
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or distributed.world_size() == 1 or not optimizer.draws_apart():
            return
        inner = module if active is None else active
        name = type(inner.module if isinstance(inner, DistributedDataParallel) else inner).__name__
        raise RuntimeError(
            f"DistributedDataParallel averages the gradients of {name} over processes whose weights differ, "
            "because each draws its own noise: call the plain module; VOGN, IVON and Noisy K-FAC average "
            "over processes themselves, and samplers run one chain per process, or one for all if each gets "
            "a generator with the same seed"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return AveragingGuard, ()
