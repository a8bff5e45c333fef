"""How long to train, and on how large batches, where the user does not say."""

from __future__ import annotations

import math

__all__ = ["default_batch", "default_epochs"]

_EPOCHS, _UPDATES = 10, 2000
_SMALLEST, _LARGEST, _BATCHES = 8, 128, 16


def default_batch(examples: int) -> int:
    """Return a batch size that leaves at least 16 batches to an epoch: a power of two from 8 to 128.

    Example:
        >>> [default_batch(n) for n in (60, 500, 1000, 60_000)]
        [8, 16, 32, 128]
    """
    wanted = max(1, examples // _BATCHES)
    return min(_LARGEST, max(_SMALLEST, 1 << (wanted.bit_length() - 1)))


def default_epochs(batches: int) -> int:
    """Return 10 epochs, or as many as 2,000 updates take: on a small table 10 epochs teach nothing.

    Example:
        >>> [default_epochs(batches) for batches in (8, 32, 469)]
        [250, 63, 10]
    """
    return max(_EPOCHS, math.ceil(_UPDATES / max(1, batches)))
