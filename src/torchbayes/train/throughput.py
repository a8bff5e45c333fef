"""How fast `fit` computes, whatever the method: the memory format of images, and `torch.compile`.

Only the inputs are put into the format: layers pass it on, and convolutions take weights of either. The
weights themselves stay as they are, so that draws, updates, checkpoints and posteriors do not depend on it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchbayes.core import distributed
from torchbayes.core.batch import batch_len, device_of, map_tensors, slice_batch
from torchbayes.core.device import forked_random_numbers

__all__ = [
    "FORMATS",
    "arranged",
    "check_backend",
    "check_format",
    "choose_format",
    "compiled",
    "emulates",
    "few",
]

FORMATS = ("auto", "channels_last", "contiguous")

_LOG = logging.getLogger("torchbayes")
_EXAMPLES, _REPETITIONS = 64, 3
_WORTH = 0.97  # of the time: less of a difference may be noise
_LAST, _FIRST = "channels_last", "contiguous"
# oneDNN issue 6035: the gradient of the weights of a 1×1 convolution with a stride corrupts the heap, or is
# wrong, if it has fewer input channels than a block of the AVX2 kernel.
_LEAST_CHANNELS = 8


def arranged(inputs: Any, memory_format: str | None) -> Any:
    """Return inputs whose tensors of four dimensions are in a memory format.

    Example:
        >>> arranged(torch.zeros(2, 3, 4, 5), "channels_last").stride()
        (60, 1, 15, 3)
    """
    if memory_format is None:
        return inputs
    return map_tensors(inputs, _to_last if memory_format == _LAST else _to_first)


def _to_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4 or (tensor.stride(1) == 1 and _is_last(tensor)):
        return tensor
    # Not by `contiguous`, which leaves a tensor with one channel as it is: convolutions go by the strides.
    return torch.empty_like(tensor, memory_format=torch.channels_last).copy_(tensor)


def _is_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _to_first(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if tensor.dim() == 4 else tensor


def choose_format(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], inputs: Any) -> str:
    """Time both formats on a copy of a network, in turns, and return the faster; that of the first process.

    Args:
        model: The network, which is not changed.
        loss: Computes the loss of a network for inputs of one batch.
        inputs: The batch.
    """
    best = _FIRST
    if any(p.dim() == 4 for p in model.parameters()):
        danger = _overrun(model, loss, inputs)
        if danger is None:
            best = _timed(copy.deepcopy(model), loss, inputs)
        else:
            _LOG.info("memory_format: contiguous, because of %s", danger)
    return FORMATS[int(distributed.gather(torch.tensor(FORMATS.index(best)))[0])]


def _overrun(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], inputs: Any) -> str | None:
    """Return what would write past its memory in channels_last on a CPU, or None."""
    if device_of(model).type != "cpu":
        return None
    watching = _StridedPointwise()  # type: ignore[no-untyped-call]
    try:
        with forked_random_numbers(), torch.no_grad(), watching:
            loss(copy.deepcopy(model), arranged(inputs, _FIRST))
    except RuntimeError:  # as training will say
        return None
    if not watching.fewest < _LEAST_CHANNELS:
        return None
    return (
        f"a 1×1 convolution with a stride and {watching.fewest} input channels, whose gradient oneDNN writes "
        f"past its memory below {_LEAST_CHANNELS}"
    )


class _StridedPointwise(TorchDispatchMode):
    """Notes the fewest input channels of 1×1 convolutions with a stride."""

    fewest = 1 << 30

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            weight, stride = args[1], args[3]
            if weight.dim() == 4 and tuple(weight.shape[2:]) == (1, 1) and max(stride) > 1:
                self.fewest = min(self.fewest, weight.shape[1])
        return func(*args, **(kwargs or {}))


def _timed(twin: nn.Module, loss: Callable[[nn.Module, Any], Tensor], inputs: Any) -> str:
    device, times = device_of(twin), {_FIRST: [0.0], _LAST: [0.0]}
    with forked_random_numbers():
        for _ in range(1 + _REPETITIONS):
            for form in times:
                piece = arranged(inputs, form)
                started = _now(device)
                try:
                    loss(twin, piece).backward()
                except RuntimeError as error:
                    _LOG.info(
                        "memory_format: contiguous, because of %s", str(error).splitlines()[0]
                    )
                    return _FIRST
                times[form].append(_now(device) - started)
                twin.zero_grad()
    least = {form: min(all_of[2:]) for form, all_of in times.items()}  # the first one warms up
    best = _LAST if least[_LAST] < _WORTH * least[_FIRST] else _FIRST
    ratio = least[_LAST] / least[_FIRST]
    _LOG.info("memory_format: %s (channels_last takes %.2f of contiguous)", best, ratio)
    return best


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    elif torch.get_num_threads() == 1:  # other programs then do not count
        return time.process_time()
    return time.perf_counter()


def check_format(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], inputs: Any, memory_format: str
) -> None:
    """Raise a `ValueError` if a network cannot compute in a format."""
    danger = _overrun(model, loss, inputs) if memory_format == _LAST else None
    if danger is not None:
        raise ValueError(
            f"memory_format={memory_format!r} is not safe for {type(model).__name__} because of {danger}: "
            "give the layer more channels, or leave out memory_format"
        )
    twin = copy.deepcopy(model)
    try:
        with forked_random_numbers():
            loss(twin, arranged(inputs, memory_format)).backward()
    except RuntimeError as error:
        raise ValueError(
            f"{type(model).__name__} cannot compute with memory_format={memory_format!r} "
            f"({str(error).splitlines()[0]}): use reshape or flatten in place of view in it, or leave out "
            "memory_format"
        ) from error


def emulates(amp: str | None, device: torch.device) -> bool:
    """Whether a processor has no instructions for a type, so that convolutions in it are far slower."""
    if amp is None or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    short = "bf16" if amp == "bfloat16" else "fp16"
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported", None)
    return supported is not None and not supported()


def few(inputs: Any, targets: Tensor, splits: bool) -> tuple[Any, Tensor]:
    """Return as much of a batch as is needed to see which format is faster."""
    if not splits or batch_len(inputs) <= _EXAMPLES:
        return inputs, targets
    return slice_batch(inputs, 0, _EXAMPLES), targets[:_EXAMPLES]


def check_backend(backend: bool | str) -> None:
    """Raise a `ValueError` if `torch.compile` has no such back end."""
    if isinstance(backend, bool):
        return
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join(sorted(torch.compiler.list_backends()))
        raise ValueError(
            f"compile is {backend!r}, but torch.compile has no such back end: pass True, or one of {usual}"
        )


@contextlib.contextmanager
def compiled(model: nn.Module, backend: bool | str) -> Iterator[None]:
    """Let calls of a network run what `torch.compile` makes of it inside the block; its names stay.

    `nn.Module.compile` does nothing to torch's own containers, such as `nn.Sequential`.

    Args:
        model: The network.
        backend: Name of a back end, True for torch's usual one, False not to compile.
    """
    if backend is False:
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    how = {} if backend is True else {"backend": backend}
    model._compiled_call_impl = torch.compile(forward, **how)  # type: ignore[call-overload]
    try:
        yield
    finally:
        model._compiled_call_impl = None
