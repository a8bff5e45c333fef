"""How far a Laplace posterior may reach: as long as its draws together fit the training data.

While the approximation holds, averaging predictions over N(w*, P⁻¹) costs no log-likelihood on the training
data to first order in P⁻¹: what single draws lose, ½ tr(H P⁻¹) in all, their average gains by being less
certain. A network that fits its data perfectly has next to no curvature H there. The posterior is then
nearly as wide as the prior, and draws leave the region in which the approximation says anything; what they
cost shows it. What is next to nothing depends on what the network itself loses: one that gives its training
labels a probability of 0.999 loses 0.001 nats an example, and 0.01 nats on top of that are ten times as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchbayes.core import distributed
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


def narrowed(la: Laplace, inputs: Any, targets: Tensor) -> bool:
    """Double the prior's precision until draws cost next to nothing; return whether it had to be.

    Args:
        la: The posterior, with one precision as its prior.
        inputs: Some of the training data.
        targets: Their targets.
    """
    losses = distributed.gather(torch.tensor(_nll(la, Point(snapshot(la.model)), inputs, targets)))
    own = float(torch.stack(losses).mean())
    labels = isinstance(la.likelihood, Categorical | Bernoulli)
    most = min(_COST, _SHARE * own) if labels else _COST
    start = last = float(la.prior.scalar or 0.0)
    for _ in range(_TIMES):
        costs = distributed.gather(torch.tensor(_nll(la, la.posterior(), inputs, targets)))
        if float(torch.stack(costs).mean()) - own <= most:
            break
        last *= _FACTOR
        la.prior = last
    return last > start


def _nll(la: Laplace, posterior: Posterior, inputs: Any, targets: Tensor) -> float:
    found = predictive(
        la.model, posterior, inputs, _DRAWS, la.likelihood,
        torch.Generator(targets.device).manual_seed(0), output=la._network.output, recalibrate=False,
    )  # fmt: skip
    return -float(found.log_prob(targets).double().sum()) / len(targets)
