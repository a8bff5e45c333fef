"""Work for all of torch's threads."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import cast

import torch

__all__ = ["share"]

# Parts for every thread: if a core is busy with something else, the others do more of them.
_PARTS = 4


def share(work: Callable[[int, int], None], count: int, least: int) -> None:
    """Call `work(first, last)` for parts of range(count), on as many threads as torch uses.

    Args:
        work: Does its part of the work, with Python's lock released, else there is nothing to gain.
        count: How much there is to do.
        least: How much is worth a thread of its own.
    """
    workers = min(torch.get_num_threads(), count // least)
    if workers <= 1:
        work(0, count)
        return
    parts = workers * _PARTS
    bounds = [count * i // parts for i in range(parts + 1)]
    jobs = deque(pairwise(bounds))
    errors: list[BaseException] = []

    def take(_data: int | None = None) -> None:
        while True:
            try:
                job = jobs.popleft()
            except IndexError:
                return  # nothing is left
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


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="torchbayes")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork
