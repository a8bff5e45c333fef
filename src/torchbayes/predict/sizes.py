"""How much memory tensors take: those that there are, and those that a forward pass makes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchbayes.core.private import LeakWatch

__all__ = ["OperationSizes", "size_of"]


def size_of(value: Any) -> int:
    """Return the bytes of all tensors in tuples, lists and dicts."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


class OperationSizes(LeakWatch):
    """Records how much memory the result of every operation takes, and whether vmap knows them all.

    Args:
        model: The user's network.
        twin: Its private copy, which runs.

    Attributes:
        bytes: Size of every operation's result.
        batched: Whether vmap has a rule for every operation. It loops over one without a rule, more slowly
            than a loop over draws.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bytes: list[int] = []
        self.batched = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and look at its result."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.bytes.append(size_of(result))
        self.batched = self.batched and _has_rule(func)
        return result


@cache
def _has_rule(func: Any) -> bool:
    """Whether vmap has a rule for an operation; torch says so only in a warning, which is not per thread."""
    name = func.name()
    return not any("Tensor" in str(argument.type) for argument in func._schema.arguments) or any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        for key in ("FuncTorchBatched", "FuncTorchBatchedDecomposition")
    )
