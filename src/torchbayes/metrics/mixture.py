"""Density and quantiles of equal-weight mixtures, one component per draw.

The predictions themselves (`torchbayes.predict`) use these too: the formulas stand here once, in a module
that imports nothing else of the library.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_HALVINGS = 60


def mixture_log_prob(each: Tensor) -> Tensor:
    """Return the mixture's log-density (...), given the components' (S, ...)."""
    return each.logsumexp(0) - math.log(len(each))


def mixture_quantile(q: float, each: Tensor, cdf: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mixture's quantile (...), by bisection to the precision of its type.

    Args:
        q: Probability below the result.
        each: Quantiles of the components (S, ...); the mixture's lies between them.
        cdf: Returns the components' distribution functions (S, ...) at values (...).
    """
    if not 0 < q < 1:
        raise ValueError(
            f"q is {q:g}: expected a probability strictly between 0 and 1, such as 0.95"
        )
    low, high = each.amin(0), each.amax(0)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if not bool(((low < middle) & (middle < high)).any()):
            break  # no number of this type is left in between
        reached = cdf(middle).mean(0) >= q
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high
