"""Split-conformal prediction: sets of classes and intervals of numbers that are right as often as requested.

Vovk et al. 2005; for classes, Sadinle, Lei and Wasserman, "Least ambiguous set-valued classifiers with
bounded error levels", JASA 2019. The score of a class is 1 − p(class). With the scores s₁ ≤ … ≤ s_n of the
true classes of n calibration examples, the set of a new example holds every class whose score is at most
s_k, k = ⌈(n + 1) · coverage⌉. If old and new examples are exchangeable, it contains the true class with
probability k/(n + 1) ≥ coverage, however good the network is: a worse one has larger sets.

Intervals have one of two scores. The absolute residual |y − μ(x)| (Lei et al., "Distribution-free predictive
inference for regression", JASA 2018) gives μ(x) ± s_k, as wide for every x. Conformalised quantile regression
(Romano, Patterson and Candès, NeurIPS 2019, equations 6 to 8) takes the predictive's own quantiles at
(1 ∓ coverage)/2 and the score max(q_low(x) − y, y − q_high(x)): the interval [q_low − s_k, q_high + s_k] is
wider where the network is less certain, and s_k < 0 narrows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbayes.posthoc._labels import as_classes, checked
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import ClassPredictive, RegressionPredictive, like_predictions

__all__ = [
    "ConformalIntervals",
    "ConformalSets",
    "conformal_intervals",
    "conformal_sets",
    "conformal_threshold",
]

_SCORES = ("residual", "quantile")


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

    def __call__(self, predictive: ClassPredictive | BinaryPredictive) -> Tensor:
        """Return which classes are in each example's set, a boolean tensor (examples, classes, …).

        If accuracy is above the requested coverage, some sets are empty: those of examples unlike any in
        the calibration set. Treat them as abstentions.
        """
        return 1 - as_classes(predictive).probs.double() <= self.threshold


def conformal_sets(
    predictive: ClassPredictive | BinaryPredictive,
    targets: Tensor,
    coverage: float = 0.9,
    ignore_index: int | None = None,
) -> ConformalSets:
    """Find the rule whose sets contain the true class with probability `coverage`.

    The guarantee is over the calibration examples and the new one together; on one calibration set of n
    examples the coverage of new ones is off by about √(coverage · (1 − coverage) / n).
    Every position of a map, and every binary label, counts as an example. Those of one map are not
    exchangeable with those of another, so their coverage holds on average over many maps.

    Args:
        predictive: Predictions on examples that nothing was fitted to, not even a temperature.
        targets: Classes of these examples, one for each position of a map.
        coverage: Requested probability, between 0 and 1.
        ignore_index: Label of what is not labelled, or None.

    Example:
        >>> import torch, torchbayes as tb
        >>> probs = torch.tensor([[0.6, 0.3, 0.1]]).repeat(10, 1)
        >>> p = tb.ClassPredictive(probs, torch.zeros(10), 1)
        >>> sets = tb.posthoc.conformal_sets(p, torch.tensor([0] * 6 + [1] * 4), coverage=0.8)
        >>> sets(p)[0].tolist()                    # the first class alone would be right 6 times in 10
        [True, True, False]
    """
    _check_coverage(coverage)
    probs, labels = checked(predictive, targets, ignore_index)
    scores = 1 - probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    return ConformalSets(coverage, conformal_threshold(scores, coverage))


@dataclass(frozen=True, eq=False)
class ConformalIntervals:
    """A rule that turns predictions into intervals; call it with new predictions.

    Attributes:
        coverage: Requested probability that the interval contains the target.
        score: `"residual"` or `"quantile"`.
        margin: What is added at both ends, one number per output; infinite if there were too few examples.
    """

    coverage: float
    score: str
    margin: Tensor

    def __call__(self, predictive: RegressionPredictive) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper ends, each of the shape of the predicted means, in float64."""
        low, high = _ends(predictive, self.coverage, self.score)
        margin = self.margin.to(low.device)
        lower, upper = low - margin, high + margin
        # A margin below 0 may leave nothing of a narrow interval but its middle.
        middle = 0.5 * (low + high)
        crossed = lower > upper
        return torch.where(crossed, middle, lower), torch.where(crossed, middle, upper)


def conformal_intervals(
    predictive: RegressionPredictive,
    targets: Tensor,
    coverage: float = 0.9,
    score: str = "quantile",
) -> ConformalIntervals:
    """Find the rule whose intervals contain the target with probability `coverage`.

    The guarantee is that of `conformal_sets`; with several outputs per example it is each output's own.

    Args:
        predictive: Predictions on examples that nothing was fitted to.
        targets: True values of these examples.
        coverage: Requested probability, between 0 and 1.
        score: `"quantile"` to correct the predictive's own quantiles (conformalised quantile regression), or
            `"residual"` for the same width everywhere, which needs nothing of the predictive but its mean.

    Example:
        >>> import torch, torchbayes as tb
        >>> p = tb.GaussianNoise(0.1).predictive(torch.zeros(1, 999, 1))   # far too sure of itself
        >>> y = torch.linspace(-1, 1, 999)
        >>> low, high = tb.posthoc.conformal_intervals(p, y, coverage=0.8)(p)
        >>> round(float(((low[:, 0] <= y) & (y <= high[:, 0])).double().mean()), 2)
        0.8
    """
    _check_coverage(coverage)
    if score not in _SCORES:
        raise ValueError(f"score is {score!r}: expected {' or '.join(map(repr, _SCORES))}")
    if not isinstance(predictive, RegressionPredictive):
        raise TypeError(
            f"predictions are a {type(predictive).__name__}: expected those of a regression; classes have "
            "conformal_sets"
        )
    low, high = _ends(predictive, coverage, score)
    values = like_predictions(torch.as_tensor(targets).to(low), low.shape)
    if not bool(values.isfinite().all()):
        raise ValueError("targets contain a value that is not finite: remove such examples")
    scores = torch.maximum(low - values, values - high).reshape(len(low), -1)
    margins = [conformal_threshold(column, coverage) for column in scores.T]
    margin = torch.tensor(margins, dtype=torch.float64)
    return ConformalIntervals(coverage, score, margin.reshape(low.shape[1:]))


def _ends(predictive: RegressionPredictive, coverage: float, score: str) -> tuple[Tensor, Tensor]:
    """Return the interval before it is corrected: the mean alone, or between two quantiles."""
    if score == "residual":
        mean = predictive.mean.double()
        return mean, mean
    ends = [predictive.quantile(0.5 + side * coverage / 2).double() for side in (-1, 1)]
    return ends[0], ends[1]


def _check_coverage(coverage: float) -> None:
    if not 0 < coverage < 1:
        raise ValueError(f"coverage is {coverage:g}: expected between 0 and 1, such as 0.9")
