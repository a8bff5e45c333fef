"""Weights of the KL term in Bayes by Backprop's minibatch objective.

The free energy of the whole training set is F = KL + Σ NLL, a sum over `train_size` examples. A minibatch's
loss here is a *mean* over its examples,

    loss = mean NLL + weight · KL / train_size

which with weight 1 is an unbiased estimate of F / train_size. Over an epoch of M equal minibatches,
Σ loss · train_size / M = Σ NLL + KL · (mean of the weights): a schedule whose weights have mean 1 over an
epoch minimises F, however it spreads them.

Blundell et al. write the minibatch cost as a sum, πᵢ KL + Σ NLL with Σ πᵢ = 1 (ICML 2015, section 3.4);
dividing by the batch size train_size / M gives weight = M πᵢ.
"""

from __future__ import annotations

import math

__all__ = ["annealed_weight", "blundell_weight", "uniform_weight"]


def _check(step: int, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}: expected a whole number of at least 1")
    if step < 0:
        raise ValueError(f"step is {step}: expected a whole number of at least 0")


def uniform_weight(step: int, steps: int) -> float:
    """Weigh all minibatches alike, πᵢ = 1/M: the weight is 1.

    Args:
        step: Number of the minibatch in its epoch, from 0.
        steps: Number M of minibatches in an epoch.

    Example:
        >>> uniform_weight(3, 10)
        1.0
    """
    _check(step, steps)
    return 1.0


def blundell_weight(step: int, steps: int) -> float:
    """Give the first minibatches most of the KL term, πᵢ = 2^(M−i) / (2^M − 1): the weight is M πᵢ.

    The weights start again with every epoch. They are computed as 2^(−i) / (1 − 2^(−M)), which cannot
    overflow.

    Args:
        step: Number of the minibatch in its epoch, i − 1, from 0.
        steps: Number M of minibatches in an epoch.

    Example:
        >>> [round(blundell_weight(i, 2), 4) for i in range(2)]   # 2 · (2/3, 1/3)
        [1.3333, 0.6667]
    """
    _check(step, steps)
    if step >= steps:
        raise ValueError(f"step is {step}: expected one of the {steps} minibatches of the epoch")
    return steps * math.ldexp(1.0, -(step + 1)) / -math.expm1(-steps * math.log(2))


def annealed_weight(step: int, steps: int) -> float:
    """Rise linearly from near 0 to 1, so that the network can learn before the prior takes effect.

    From `steps` on the weight is 1 and the objective is the free energy.

    Args:
        step: Number of the update in the whole training, from 0.
        steps: Number of updates that the rise takes.

    Example:
        >>> [annealed_weight(i, 4) for i in (0, 1, 3, 100)]
        [0.25, 0.5, 1.0, 1.0]
    """
    _check(step, steps)
    return min(1.0, (step + 1) / steps)
