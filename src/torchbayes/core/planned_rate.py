"""The course of a learning rate that nobody has given."""

from __future__ import annotations

import math

__all__ = ["planned_rate"]

# Without a number of planned steps, and as a share of it: the steps over which the rate rises.
_WARM_UPDATES, _WARM_UP = 100, 0.05


def planned_rate(step: int, steps: int | None) -> float:
    """Return the factor of the learning rate at a step, from 1: a short rise, then half a cosine to 0.

    Args:
        step: Number of the step.
        steps: How many are planned; if None the rise is followed by a constant rate.
    """
    if steps is None:
        return min(1.0, step / _WARM_UPDATES)
    rise = min(1.0, step / (_WARM_UP * steps + 1))
    return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
