"""Functions that torch hands to an active mode as a whole, copied so that the mode sees inside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["opened"]

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def opened(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Copy a Python function of `torch.nn.functional` so that modes see inside; None for any other."""
    if not isinstance(func, FunctionType) or func.__module__ != "torch.nn.functional":
        return None
    scope = func.__globals__ | dict.fromkeys(_CHECKS, lambda *_: False)
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
