"""Run torch's composite functions so that a torch-function mode sees the operations inside them.

`torch.nn.functional.multi_head_attention_forward` and its like hand themselves to an active mode as a
whole. A copy of such a function that believes no mode is active runs its body instead, and the mode then
sees the linear maps inside: with the dropout masks, shapes and flags that were really used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["opened"]

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no_mode(*_args: Any) -> bool:
    return False


@functools.cache
def opened(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a Python function of `torch.nn.functional` that can be seen into; None for any other."""
    if not isinstance(func, FunctionType) or func.__module__ != "torch.nn.functional":
        return None
    scope = dict(func.__globals__)
    scope.update(dict.fromkeys(_CHECKS, _no_mode))
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
