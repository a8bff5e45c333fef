"""How many inputs a unit has, and what follows for steps and noise of its weights.

A unit sums over its fan-in f: noise of variance v in each of its weights gives noise of variance f·v in the
sum, and steps of length α in all of them move it by up to f·α.
"""

from __future__ import annotations

import math

from torch import nn

__all__ = ["fan_ins", "least_precision", "rate_share"]

# The noise of a unit whose inputs have unit size has at most this variance: a standard deviation of 0.17.
_UNIT_VARIANCE = 1 / 34
_FULL_RATE = 8


def fan_ins(model: nn.Module) -> dict[int, int]:
    """Return the fan-in of each parameter, by its `id`.

    For a bias it is that of the weights beside it, and for a norm layer, whose outputs the next layer sums
    over, the number of its channels.

    Example:
        >>> from torch import nn
        >>> layer = nn.Conv2d(3, 8, 5)
        >>> fan_ins(layer)[id(layer.weight)], fan_ins(layer)[id(layer.bias)]
        (75, 75)
    """
    found: dict[int, int] = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        sizes = {id(p): max(1, p.shape[1:].numel()) for p in own if p.dim() > 1 and len(p)}
        for p in own:
            beside = max(sizes.values(), default=max(1, p.numel()))
            found.setdefault(id(p), sizes.get(id(p), beside))
    return found


def least_precision(fan_in: int) -> float:
    """Return the precision of weights below which their unit is too noisy to learn."""
    return fan_in / _UNIT_VARIANCE


def rate_share(fan_in: int) -> float:
    """Return the share of the learning rate that suits the weights of a unit: √(8/f), at most 1."""
    return min(1.0, math.sqrt(_FULL_RATE / fan_in))
