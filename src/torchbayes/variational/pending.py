"""Tensors with updates that are still to be made: whoever uses one has them made first.

torch asks the class of a tensor before every function, method and attribute of it. So a tensor with pending
updates has a class of its own until it is used, however it was found: through its module, an optimiser, a
copy, or kept from before. Then it is an ordinary one again. What takes a tensor's memory without asking, as
scripted functions and extensions in C++ do, may miss updates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["Maker", "Pending", "finish", "is_plain", "made", "postpone"]


class Maker(Protocol):
    """What makes updates."""

    def finish(self, tensor: Tensor) -> None:
        """Make the pending updates of a tensor, and call `made` before there are others."""


# What tells nothing of the values and is asked of every parameter in a step, by clipping for one.
_WITHOUT_VALUES = {
    getattr(getattr(Tensor, name), method)
    for name, methods in {
        "grad": ("__get__", "__set__", "__delete__"), "requires_grad": ("__get__",), "shape": ("__get__",),
        "dtype": ("__get__",), "device": ("__get__",),
    }.items()
    for method in methods
}  # fmt: skip


class Pending(Tensor):
    """A tensor with pending updates."""

    maker: Maker

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, after the updates of its arguments."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, Pending):
                finish(argument)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish(self)
        return self.__reduce_ex__(protocol)


class _PendingParameter(Pending, nn.Parameter):
    pass


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has torch's own class and is used in this process only, so that updates may wait."""
    return isinstance(tensor, Pending) or (
        type(tensor) in (Tensor, nn.Parameter) and not tensor.is_shared()
    )


def postpone(tensor: Tensor, maker: Maker) -> None:
    """Have updates made when a tensor is used, which `is_plain` holds for and nobody else has updates of."""
    if not isinstance(tensor, Pending):
        tensor.__class__ = _PendingParameter if isinstance(tensor, nn.Parameter) else Pending
    tensor.maker = maker  # type: ignore[attr-defined]


def made(tensor: Tensor) -> None:
    """Let a tensor be an ordinary one again, after its updates."""
    if isinstance(tensor, Pending):
        del tensor.maker
        kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
        tensor.__class__ = kind  # type: ignore[assignment]


def finish(tensor: Tensor) -> None:
    """Have the updates of a tensor made, if there are any, whatever torch is doing with operations here."""
    maker = getattr(tensor, "maker", None) if isinstance(tensor, Pending) else None
    if maker is not None:  # else another thread has just done it
        with (
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            maker.finish(tensor)
