"""Run the compiled loop of a pure function on torch's tensors and threads."""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchbayes.kernels.loops import Loop

__all__ = ["run"]

_LOG = logging.getLogger("torchbayes")

# Fewer weights than this are updated before numba could be imported.
_LEAST = 1 << 14

# Chunks (of 1,024 entries) that are worth a thread: they take a few hundred microseconds, waking it some 50.
_CHUNKS_PER_THREAD = 64

# Parts per thread: if a core is busy with something else, the others take more of them.
_PARTS = 4


def run(
    update: Callable[..., Any],
    changed: Sequence[Sequence[Tensor]],
    given: Sequence[Sequence[Tensor]],
    generator: torch.Generator | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
    **scalars: Any,
) -> list[float] | None:
    """Run the compiled loop of a pure function, if it has one that can take these tensors.

    The random numbers depend on the generator's state alone, not on the number of threads, and are those
    that `torchbayes.core.noise.normals_` would give for one tensor with as many entries.

    Args:
        update: The pure function.
        changed: Columns to change, each a list of tensors: the first of every list belong together, the
            second, and so on.
        given: Columns to read.
        generator: Source of random numbers; torch's global generator if None.
        spans: For tensors that are slices of larger ones, where each begins in its own, as a flat tensor,
            and how many entries that has: it gets the random numbers of that slice.
        scalars: Scalars of the function. A loop takes numbers and, as its last, an array of them; no columns.

    Returns:
        The sums that the loop computes, an empty list for most loops; None if there was nothing to run.
    """
    columns = [*changed, *given]
    wholes = [tensor.numel() for tensor in columns[0]] if spans is None else [n for _, n in spans]
    if sum(wholes) < _LEAST or any(isinstance(v, list | tuple) for v in scalars.values()):
        return None
    if not _fit(columns, generator):
        return None
    loops, chunk = _loops()
    loop = loops.get((update.__module__, getattr(update, "__name__", "")))
    if loop is None:
        return None
    ends = np.fromiter(accumulate(tensor.numel() for tensor in columns[0]), np.int64)
    places = np.fromiter(accumulate(wholes, initial=0), np.int64)[:-1]
    if spans is not None:
        places += np.fromiter((start for start, _ in spans), np.int64)
    addresses = np.empty((len(ends), len(columns)), np.int64)
    for number, column in enumerate(columns):
        addresses[:, number] = [tensor.data_ptr() for tensor in column]
    key = [0, 0]
    if loop.draws:
        words = torch.empty(2, dtype=torch.int64)
        key = words.random_(0, 1 << 32, generator=generator).tolist()
    rows = [np.ravel(scalars[name]).astype(np.float64) for name in loop.scalars]
    numbers = np.concatenate(rows) if rows else np.empty(0)
    chunks = -(-int(ends[-1]) // chunk)
    sums = np.zeros((chunks if loop.sums else 1, loop.sums))
    walk = loop.walk

    def part(first: int, last: int) -> None:
        walk(addresses, ends, places, first, last, *key, numbers, sums)

    _share(part, chunks, _CHUNKS_PER_THREAD)
    for column in changed:
        for tensor in column:
            if not tensor.is_inference():  # autograd must know that it has changed
                torch.autograd.graph.increment_version(tensor)
    total: list[float] = sums.sum(0).tolist()
    return total


def _fit(columns: Sequence[Sequence[Tensor]], generator: torch.Generator | None) -> bool:
    """Whether the loops can take these tensors."""
    sizes = [tensor.numel() for tensor in columns[0]]
    return (
        (generator is None or generator.device.type == "cpu")
        and all(_is_plain(tensor) for column in columns for tensor in column)
        # A tensor that torch would broadcast is too short for a loop.
        and all([tensor.numel() for tensor in column] == sizes for column in columns)
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and type(tensor) in (Tensor, nn.Parameter)
    )


@cache
def _loops() -> tuple[dict[tuple[str, str], Loop], int]:
    _LOG.info("loading the compiled loops; the first use of each takes a few seconds")
    from torchbayes.kernels import loops  # only when needed: numba takes half a second

    return loops.LOOPS, loops.CHUNK


def _share(work: Callable[[int, int], None], count: int, least: int) -> None:
    """Call `work(first, last)` for parts of range(count), on as many threads as torch uses.

    Args:
        work: Function for a part of the work, which must release Python's lock to gain anything.
        count: Amount of work.
        least: Amount that is worth a thread.
    """
    workers = min(torch.get_num_threads(), count // least)
    if workers <= 1:
        work(0, count)
        return
    parts = workers * _PARTS
    jobs = deque(pairwise(count * i // parts for i in range(parts + 1)))
    errors: list[BaseException] = []

    def take(_data: int | None = None) -> None:
        while True:
            try:
                job = jobs.popleft()
            except IndexError:
                return  # no jobs are left
            try:
                work(*job)
            except BaseException as error:  # it cannot pass through OpenMP's frames
                errors.append(error)
                return

    enter = _openmp()
    if enter is not None:
        enter(_Region(take), None, workers, 0)
    else:
        running = [_threads().submit(take) for _ in range(workers - 1)]
        take()
        for future in running:
            future.result()
    if errors:
        raise errors[0]


_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp() -> Callable[..., None] | None:
    """Return the entry to a parallel region of the OpenMP library that torch itself uses, if available.

    After an operation its threads spin for some milliseconds in case there is another one. Threads of our
    own would have to share the cores with them; on two cores that would cost the entire gain.
    """
    try:
        enter = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    enter.argtypes = [_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    enter.restype = None
    return cast(Callable[..., None], enter)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="torchbayes")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork
