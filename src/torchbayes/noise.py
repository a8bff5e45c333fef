"""Random numbers for large tensors: exact, seedable, and drawn on all cores.

torch's normal generator runs on one thread, and for a network of wide layers it takes as long as the
forward and backward pass. Here a large tensor is filled in chunks of fixed size on several threads, each
chunk from a child generator that is seeded from the master. The numbers depend on the master's state
alone, not on the number of threads or on their timing: saving the master's state is enough to repeat them.

torch's CPU generator takes 32 bits of a seed, so a child is one of 2³² streams, each of them an exact
Mersenne twister.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import cast

import torch
from torch import Tensor

__all__ = ["gaussians_", "normal_", "normals_", "random_signs"]

# Elements per child generator: a few hundred microseconds of work, so that waking a thread (some 50 µs) and
# seeding a child (5 µs) do not matter.
_CHUNK = 1 << 16


def normal_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill `tensor` with standard normal numbers and return it.

    Args:
        tensor: What to fill, in place.
        generator: Where the numbers come from; torch's global generator if not given.

    Example:
        >>> import torch
        >>> from torchbayes.noise import normal_
        >>> a = normal_(torch.empty(3), torch.Generator().manual_seed(0))
        >>> b = normal_(torch.empty(3), torch.Generator().manual_seed(0))
        >>> bool((a == b).all())
        True
    """
    normals_([tensor], generator)
    return tensor


def normals_(tensors: Sequence[Tensor], generator: torch.Generator | None = None) -> None:
    """Fill all `tensors` with standard normal numbers, sharing the work over torch's threads.

    Args:
        tensors: What to fill, in place.
        generator: Where the numbers come from; torch's global generator if not given.
    """
    _draw([(tensor.detach(),) for tensor in tensors], generator)


def gaussians_(
    tensors: Sequence[Tensor],
    means: Sequence[Tensor],
    stds: Sequence[Tensor],
    generator: torch.Generator | None = None,
) -> None:
    """Fill all `tensors` with mean + std · ε, where ε are the numbers that `normals_` gives.

    A large tensor is finished chunk by chunk, while a chunk is in the cache.

    Args:
        tensors: What to fill, in place.
        means: The mean of every entry of every tensor.
        stds: The standard deviation of every entry of every tensor.
        generator: Where the numbers come from; torch's global generator if not given.

    Example:
        >>> import torch
        >>> from torchbayes.noise import gaussians_
        >>> x = torch.empty(3)
        >>> gaussians_([x], [torch.ones(3)], [torch.zeros(3)])
        >>> x
        tensor([1., 1., 1.])
    """
    rows = zip(tensors, stds, means, strict=True)
    _draw([tuple(tensor.detach() for tensor in row) for row in rows], generator)


# A tensor to fill and, where its numbers are not to be standard normal, their std and mean.
_Wanted = tuple[Tensor, ...]


def _draw(wanted: Sequence[_Wanted], generator: torch.Generator | None) -> None:
    chunks: list[_Wanted] = []
    for row in wanted:
        tensor = row[0]
        if generator is not None and generator.device.type != tensor.device.type:
            source = torch.empty(tensor.shape, dtype=tensor.dtype, device=generator.device)
            normal_(source, generator)
            tensor.copy_(source)
            _scale(row)
        elif tensor.device.type != "cpu" or tensor.numel() <= _CHUNK or not tensor.is_contiguous():
            tensor.normal_(generator=generator)
            _scale(row)
        else:
            chunks.extend(zip(*(each.reshape(-1).split(_CHUNK) for each in row), strict=True))
    if chunks:
        seeds = torch.empty(len(chunks), dtype=torch.int64).random_(generator=generator)
        _fill(deque(zip(chunks, seeds.tolist(), strict=True)))


def _scale(row: _Wanted) -> None:
    if len(row) == 3:
        tensor, std, mean = row
        tensor.mul_(std).add_(mean)


def _fill(jobs: deque[tuple[_Wanted, int]]) -> None:
    workers = min(torch.get_num_threads(), len(jobs))
    inference = torch.is_inference_mode_enabled()
    if workers == 1:
        _work(jobs, inference)
    elif _openmp() is not None:
        _fill_by_openmp(jobs, workers, inference)
    else:
        running = [_threads().submit(_work, jobs, inference) for _ in range(workers - 1)]
        _work(jobs, inference)
        for future in running:
            future.result()


def _work(jobs: deque[tuple[_Wanted, int]], inference: bool) -> None:
    child = torch.Generator()
    with torch.inference_mode(inference):
        while True:
            try:
                row, seed = jobs.popleft()
            except IndexError:
                return
            row[0].normal_(generator=child.manual_seed(seed))
            _scale(row)


_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp() -> Callable[..., None] | None:
    """The entry to a parallel region of the OpenMP library that torch's own operations run on, if there.

    After an operation its threads spin for some milliseconds in case there is another one. Threads of our
    own would have to share the cores with them; on two cores that costs all that there is to gain.
    """
    try:
        enter = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    enter.argtypes = [_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    enter.restype = None
    return cast(Callable[..., None], enter)


def _fill_by_openmp(jobs: deque[tuple[_Wanted, int]], workers: int, inference: bool) -> None:
    errors: list[BaseException] = []

    def work(_data: int | None) -> None:
        try:
            _work(jobs, inference)
        except BaseException as error:  # it cannot pass through the library's frames
            errors.append(error)

    enter = _openmp()
    assert enter is not None
    enter(_Region(work), None, workers, 0)
    if errors:
        raise errors[0]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="torchbayes-noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork


def random_signs(
    shape: Sequence[int],
    generator: torch.Generator | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Independent fair signs, +1 or −1.

    Args:
        shape: The shape of the result.
        generator: Where they come from; torch's global generator if not given.
        dtype: The type of the result.
        device: Where the result is.

    Example:
        >>> import torch
        >>> from torchbayes.noise import random_signs
        >>> random_signs((2, 3), torch.Generator().manual_seed(0)).abs().sum().item()
        6.0
    """
    source = device if generator is None else generator.device
    count = torch.Size(shape).numel()
    # One 64-bit number serves eight signs: the lowest bit of each of its bytes.
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device=source)
    bits = words.random_(generator=generator).view(torch.uint8)[:count].bitwise_and_(1)
    return bits.to(device=device, dtype=dtype).mul_(2).sub_(1).view(shape)
