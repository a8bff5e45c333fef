"""Private copies of a network, so that predicting never writes to the user's module.

Swapping weights, switching modes and setting hooks all change a module, and threads may share one. A private
copy is a module of its own in every respect but one: its weights lie in the memory of the original's, so that
copying a network of 25 million weights takes as long as copying its modules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LeakWatch", "private_copy"]

_M = TypeVar("_M", bound=nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MEMBERS = {"_parameters", "_buffers", "_modules", *_HOOKS}


def private_copy(model: _M) -> _M:
    """Return a copy of a network in evaluation mode: weights in the same memory, buffers in its own.

    What cannot be copied, such as a lock or an open file, both have in common.

    Args:
        model: The network.

    Raises:
        TypeError: If it cannot be copied.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> twin = private_copy(model)
        >>> twin[0].weight.data_ptr() == model[0].weight.data_ptr(), twin.training, model.training
        (True, False, True)
    """
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        for p in module._parameters.values():
            if p is not None:
                memo[id(p)] = _same_memory(p)
        for buffer in module._buffers.values():
            if buffer is not None:
                memo[id(buffer)] = buffer.detach().clone()
        for value in vars(module).values():
            # Such as the weight that torch's older weight norm computes; torch refuses to copy it.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        memo |= {id(hook): hook for hook in _outside_hooks(module)}
    try:
        twin = copy.deepcopy(model, dict(memo))
    except Exception:
        memo |= {id(value): value for module in modules for value in _uncopyable(module, memo)}
        try:
            twin = copy.deepcopy(model, memo)
        except Exception as error:
            raise TypeError(
                f"{type(model).__name__} cannot be copied ({str(error).splitlines()[0]}), but predicting "
                "needs a private copy of its modules: let copy.deepcopy(model) work, for example by "
                "defining __deepcopy__ in the module with the object that cannot be copied"
            ) from error
    return twin.eval()


def _same_memory(parameter: nn.Parameter) -> Any:
    if type(parameter) is not nn.Parameter:  # such as a quantised or a distributed one
        return parameter
    return nn.Parameter(parameter.detach(), parameter.requires_grad)


def _outside_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield hooks that belong to another object than a module: a copy of that would miss the calls."""
    for hook in chain.from_iterable(getattr(module, name).values() for name in _HOOKS):
        owner = hook.__self__ if isinstance(hook, MethodType) else hook
        if not isinstance(owner, (nn.Module, partial)):
            yield hook


def _uncopyable(module: nn.Module, memo: dict[int, Any]) -> Iterator[Any]:
    for name, value in vars(module).items():
        if name not in _MEMBERS:
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                yield value


class LeakWatch(TorchDispatchMode):
    """Raises an error inside the block if a private copy reads a weight of the original.

    A function that a module holds and that refers to the module itself, such as a lambda, is the original's
    in the copy too.

    Args:
        model: The original.
        twin: The private copy.
    """

    def __init__(self, model: nn.Module, twin: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        common = {id(p) for p in twin.parameters()}
        self._names = {id(p): n for n, p in model.named_parameters() if id(p) not in common}
        self._network = type(model).__name__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skipping Dynamo would first import it, which takes longer than most predictions.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation after looking at its arguments."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) in self._names:
                raise TypeError(
                    f"{self._network} reads its weight {self._names[id(leaf)]!r} through a function that "
                    "refers to the module itself, such as a lambda, which a copy of the network cannot "
                    "replace: make the function a method of the module"
                )
        return func(*args, **(kwargs or {}))
