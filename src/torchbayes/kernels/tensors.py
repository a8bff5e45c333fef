"""From torch's tensors to the compiled loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbayes.kernels.names import Loop
from torchbayes.kernels.threads import share

__all__ = ["fits", "run"]

_LOG = logging.getLogger("torchbayes")

# Fewer weights than this are done before numba is imported.
_LEAST = 1 << 14

# Chunks (of 1,024 entries) that are worth a thread: a few hundred microseconds against some 50 to wake it.
_CHUNKS_PER_THREAD = 64

_COLUMNS = 7

# How many of a loop's columns it changes.
_CHANGED = {
    Loop.PSGLD: 2, Loop.SGHMC: 2, Loop.SGNHT: 3, Loop.ATMC: 3, Loop.BBB: 4, Loop.SOFTPLUS: 2,
    Loop.BBB_GRADIENTS: 2, Loop.VOGN: 3, Loop.IVON: 3,
}  # fmt: skip
_SUMMING = (Loop.BBB, Loop.MIXTURE)


def fits(columns: Sequence[Sequence[Tensor]], generator: torch.Generator | None) -> bool:
    """Whether the loops can take these tensors, and there are enough entries for them to pay.

    Args:
        columns: Lists of tensors, of which the first of each list belong together, the second, and so on.
        generator: Where random numbers come from.
    """
    sizes = [tensor.numel() for tensor in columns[0]]
    return (
        (generator is None or generator.device.type == "cpu")
        and sum(sizes) >= _LEAST
        and all(_plain(tensor) for column in columns for tensor in column)
        # One that torch would broadcast is too short for a loop.
        and all([tensor.numel() for tensor in column] == sizes for column in columns)
    )


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and type(tensor) in (Tensor, nn.Parameter)
    )


def run(
    loop: Loop,
    columns: Sequence[Sequence[Tensor]],
    numbers: Sequence[float],
    generator: torch.Generator | None = None,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Apply a loop to tensors that `fits` says yes to, in place.

    The random numbers depend on the generator's state alone, not on the number of threads, and are those
    that `torchbayes.core.noise.normals_` would give for one tensor with as many entries.

    Args:
        loop: What to do.
        columns: What `Loop` says, each a list of tensors.
        numbers: What `Loop` says.
        generator: Where the random numbers come from; torch's global generator if None.

    Returns:
        The sums that the loop has; 0 for most of them.
    """
    walk, chunk = _compiled_loops()
    ends = np.fromiter(accumulate(tensor.numel() for tensor in columns[0]), np.int64)
    addresses = np.empty((len(ends), _COLUMNS), np.int64)
    for number in range(_COLUMNS):
        column = columns[min(number, len(columns) - 1)]
        addresses[:, number] = [tensor.data_ptr() for tensor in column]
    key = [0, 0]
    if loop <= Loop.BBB:
        words = torch.empty(2, dtype=torch.int64)
        key = words.random_(0, 1 << 32, generator=generator).tolist()
    scalars = np.array(numbers, np.float32)

    chunks = -(-int(ends[-1]) // chunk)
    sums = np.zeros((chunks if loop in _SUMMING else 1, 4))

    def part(first: int, last: int) -> None:
        walk(int(loop), addresses, ends, first, last, *key, scalars, sums)

    share(part, chunks, _CHUNKS_PER_THREAD)
    for column in columns[: _CHANGED.get(loop, 1)]:
        for tensor in column:
            if not tensor.is_inference():  # autograd must know that it is not what it was
                torch.autograd.graph.increment_version(tensor)
    total: np.ndarray[Any, np.dtype[np.float64]] = sums.sum(0)
    return total


@cache
def _compiled_loops() -> tuple[Callable[..., None], int]:
    _LOG.info("loading the compiled loops; when this is the first time, that takes some seconds")
    from torchbayes.kernels import loops  # not before it is needed: numba takes half a second

    walk: Any = loops.walk
    return walk, loops.CHUNK
