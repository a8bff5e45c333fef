"""How far a Laplace posterior may reach: as long as its draws together fit the training data.

While the approximation holds, averaging predictions over N(w*, P⁻¹) costs no log-likelihood on the training
data to first order in P⁻¹: what single draws lose, ½ tr(H P⁻¹) in all, their average gains by being less
certain. A network that fits its data perfectly has next to no curvature H there. The posterior is then
nearly as wide as the prior, and draws leave the region in which the approximation says anything; what they
cost shows it. What is next to nothing depends on what the network itself loses: one that gives its training
labels a probability of 0.999 loses 0.001 nats an example, and 0.01 nats on top of that are ten times as much.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchbayes.core import distributed
from torchbayes.laplace.outputs import factors_of
from torchbayes.likelihood import Bernoulli, Categorical
from torchbayes.posterior import Point, Posterior, snapshot
from torchbayes.predict.predictive import predictive

if TYPE_CHECKING:
    from torchbayes.laplace.laplace import Laplace

__all__ = ["narrowed"]

# What the draws together may cost, in nats per example, and with labels also as a share of the network's own
# loss, which has no such meaning for the density of a real target; how many draws are taken; the factor by
# which the precision grows until they cost no more, and how often it may.
_COST, _SHARE, _DRAWS, _FACTOR, _TIMES = 0.01, 0.1, 32, 2.0, 40


def narrowed(la: Laplace, kept: tuple[Any, Tensor, Tensor | None] | None) -> bool:
    """Double the prior's precision until draws cost next to nothing; return whether it had to be.

    Args:
        la: The posterior, with one precision as its prior.
        kept: Inputs, targets and weights, if any, of some of the training data; None if this process has too
            few, whose part the others then do.
    """
    if not distributed.any_of([kept is not None])[0]:
        return False
    own = _nll(la, Point(snapshot(la.model)), kept)
    if not math.isfinite(own):  # nothing to compare with
        return False
    labels = isinstance(la.likelihood, Categorical | Bernoulli)
    most = min(_COST, _SHARE * own) if labels else _COST
    before = la.prior
    start = precision = float(before.scalar or 0.0)
    for times in range(_TIMES):
        if _nll(la, la.posterior(), kept) - own <= most:
            return times > 0
        precision *= _FACTOR
        la.prior = precision
    la.prior = before
    warnings.warn(
        f"with every prior precision from {start:.3g} to {precision / _FACTOR:.3g}, draws cost more "
        f"than {most:.2g} nats per training example: the precision stays as it was, and this posterior is "
        "too wide to draw from; give a larger prior precision, or predict with Laplace.predictive",
        UserWarning,
        stacklevel=3,
    )
    return False


def _nll(
    la: Laplace, posterior: Posterior, kept: tuple[Any, Tensor, Tensor | None] | None
) -> float:
    """Return the negative log-likelihood per example of what all processes kept; NaN if none counts."""
    total, count = distributed.total((0.0, 0.0) if kept is None else _sums(la, posterior, *kept))
    return total / count if count > 0 else math.nan


def _sums(
    la: Laplace, posterior: Posterior, inputs: Any, targets: Tensor, weights: Tensor | None
) -> tuple[float, float]:
    """Return the negative log-likelihood of some examples, and how many they count for."""
    found = predictive(
        la.model, posterior, inputs, _DRAWS, la.likelihood,
        torch.Generator(targets.device).manual_seed(0), output=la._network.output, recalibrate=False,
    )  # fmt: skip
    likelihood, labels = la.likelihood, targets
    if isinstance(likelihood, Categorical) and likelihood.ignore_index is not None:
        labels = targets.masked_fill(targets == likelihood.ignore_index, 0)  # with the factor 0
    log_probs = found.log_prob(labels)
    if isinstance(likelihood, Categorical | Bernoulli):
        # As in `metrics.nll`: one label whose probability underflows would hide what all others cost.
        log_probs = log_probs.clamp_min(math.log(torch.finfo(log_probs.dtype).tiny))
    classes = isinstance(likelihood, Categorical)
    factors = factors_of(
        likelihood, log_probs.unsqueeze(1) if classes else log_probs, targets, weights
    )
    if factors is None:
        factors = torch.ones_like(log_probs)
    elif classes:
        factors = factors.squeeze(1)
    factors = factors.double().expand_as(log_probs)
    # Per example, of which each may have several positions or labels.
    count = float(factors.sum()) * len(log_probs) / log_probs.numel()
    return -float((factors * log_probs).sum()), count
