"""Split-conformal prediction sets: sets of classes that contain the true one as often as requested.

Vovk et al. 2005; for classes, Sadinle, Lei and Wasserman, "Least ambiguous set-valued classifiers with
bounded error levels", JASA 2019. The score of a class is 1 − p(class). With the scores s₁ ≤ … ≤ s_n of the
true classes of n calibration examples, the set of a new example holds every class whose score is at most
s_k, k = ⌈(n + 1) · coverage⌉. If old and new examples are exchangeable, it contains the true class with
probability k/(n + 1) ≥ coverage, however good the network is: a worse one has larger sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torchbayes.posthoc._labels import checked
from torchbayes.predict.results import ClassPredictive

__all__ = ["ConformalSets", "conformal_sets", "conformal_threshold"]


def conformal_threshold(scores: Tensor, coverage: float) -> float:
    """Return the k-th smallest score, k = ⌈(n + 1) · coverage⌉, or infinity if n is too small for it."""
    # The small number keeps 0.9 · 10 from being 9.000000000000002.
    k = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return math.inf if k > len(scores) else float(scores.kthvalue(k).values)


@dataclass(frozen=True)
class ConformalSets:
    """A rule that turns predictions into sets of classes; call it with new predictions.

    Attributes:
        coverage: Requested probability that the set contains the true class.
        threshold: Largest score 1 − p(class) of a class in a set.
    """

    coverage: float
    threshold: float

    def __call__(self, predictive: ClassPredictive) -> Tensor:
        """Return which classes are in each example's set, a boolean tensor (examples, classes).

        If accuracy is above the requested coverage, some sets are empty: those of examples unlike any in
        the calibration set. Treat them as abstentions.
        """
        return 1 - predictive.probs.double() <= self.threshold


def conformal_sets(
    predictive: ClassPredictive, targets: Tensor, coverage: float = 0.9
) -> ConformalSets:
    """Find the rule whose sets contain the true class with probability `coverage`.

    The guarantee is over the calibration examples and the new one together; on one calibration set of n
    examples the coverage of new ones is off by about √(coverage · (1 − coverage) / n).

    Args:
        predictive: Predictions on examples that nothing was fitted to, not even a temperature.
        targets: Classes of these examples.
        coverage: Requested probability, between 0 and 1.

    Example:
        >>> import torch, torchbayes as tb
        >>> probs = torch.tensor([[0.6, 0.3, 0.1]]).repeat(10, 1)
        >>> p = tb.ClassPredictive(probs, torch.zeros(10), 1)
        >>> sets = tb.posthoc.conformal_sets(p, torch.tensor([0] * 6 + [1] * 4), coverage=0.8)
        >>> sets(p)[0].tolist()                    # the first class alone would be right 6 times in 10
        [True, True, False]
    """
    if not 0 < coverage < 1:
        raise ValueError(f"coverage is {coverage:g}: expected between 0 and 1, such as 0.9")
    probs, labels = checked(predictive, targets)
    scores = 1 - probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    return ConformalSets(coverage, conformal_threshold(scores, coverage))
