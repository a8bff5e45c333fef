"""Detection of wrong predictions, and of out-of-distribution inputs, by a score.

A higher score means "positive": wrong, or out of distribution. Pass an uncertainty (entropy, mutual
information) as it is and a confidence negated. All areas use the full order of the scores: ties
count one half in `auroc` and enter the curves together. If a group is empty, the result is NaN.
`aupr`, `fpr95` and `roc_curve` take the arguments of `auroc`.

scikit-learn has these too; here they accept infinite scores, are NaN without a warning where
undefined, and `auroc` is exact for any number of scores.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchbayes.metrics import _inputs
from torchbayes.metrics.classification import confidence, correct, entropy


class RocCurve(NamedTuple):
    """Points of a ROC curve from (0, 0) to (1, 1), one for each distinct score; all (K,) float64.

    Attributes:
        fpr: Fraction of negatives whose score is at least the threshold.
        tpr: Fraction of positives whose score is at least the threshold.
        thresholds: Descending scores, the first infinite.
    """

    fpr: Tensor
    tpr: Tensor
    thresholds: Tensor


def auroc(scores_negative: Tensor, scores_positive: Tensor) -> float:
    """Compute the area under the ROC curve: how often a positive scores above a negative, ties one half.

    Args:
        scores_negative: Scores (N,) of the negatives, such as entropy in distribution.
        scores_positive: Scores (M,) of the positives, such as entropy out of distribution.

    Example:
        >>> import torch
        >>> auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 0.9]))
        0.75
    """
    negative, positive = _groups(scores_negative, scores_positive)
    pairs = len(negative) * len(positive)
    if pairs == 0:
        return float("nan")
    # The Mann-Whitney count is an integer, hence exact for any number of scores.
    below = torch.searchsorted(negative, positive).sum()
    not_above = torch.searchsorted(negative, positive, right=True).sum()
    return int(below + not_above) / (2 * pairs)


def roc_curve(scores_negative: Tensor, scores_positive: Tensor) -> RocCurve:
    """Compute the points of the ROC curve for plotting; the rates of an empty group are NaN.

    Example:
        >>> import torch
        >>> fpr, tpr, thresholds = roc_curve(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
        >>> fpr.tolist(), tpr.tolist(), thresholds.tolist()
        ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0], [inf, 2.0, 1.0, 0.0])
    """
    negative, positive = _groups(scores_negative, scores_positive)
    false, true, thresholds = _counts(negative, positive)
    return RocCurve(false / len(negative), true / len(positive), thresholds)


def aupr(scores_negative: Tensor, scores_positive: Tensor) -> float:
    """Compute the area under the precision-recall curve of the positives, as average precision.

    Example:
        >>> import torch
        >>> round(aupr(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 0.9])), 4)
        0.8333
    """
    negative, positive = _groups(scores_negative, scores_positive)
    if len(negative) == 0 or len(positive) == 0:
        return float("nan")
    false, true, _ = _counts(negative, positive)
    precision = true[1:] / (true[1:] + false[1:])
    return float((true.diff() * precision).sum()) / len(positive)


def fpr95(scores_negative: Tensor, scores_positive: Tensor) -> float:
    """Compute the false-positive rate at the highest threshold with at least 95 % of the positives detected.

    Example:
        >>> import torch
        >>> fpr95(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 0.9]))
        0.5
    """
    negative, positive = _groups(scores_negative, scores_positive)
    if len(negative) == 0 or len(positive) == 0:
        return float("nan")
    false, true, _ = _counts(negative, positive)
    return float(false[true >= 0.95 * len(positive)][0]) / len(negative)


def auroc_misclassification(probs: Tensor, targets: Tensor, by_entropy: bool = False) -> float:
    """Compute the AUROC of detecting errors by low maximum probability (Hendrycks and Gimpel 2017).

    Args:
        probs: Class probabilities (N, C).
        targets: Integer labels (N,).
        by_entropy: Whether to detect them by high entropy instead.

    Returns:
        The area, or NaN if all predictions are right or all are wrong.

    Example:
        >>> import torch
        >>> auroc_misclassification(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        1.0
    """
    probs, targets = _inputs.labelled(probs, targets)
    right = correct(probs, targets)
    uncertainty = entropy(probs) if by_entropy else -confidence(probs)
    return auroc(uncertainty[right], uncertainty[~right])


def _groups(scores_negative: Tensor, scores_positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return both groups checked, in float64 and ascending order."""
    negative = _inputs.scores(scores_negative, "scores_negative").sort().values
    positive = _inputs.scores(scores_positive, "scores_positive").sort().values
    return negative, positive


def _counts(negative: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many of each sorted group reach each threshold, and the thresholds."""
    distinct = torch.unique(torch.cat([negative, positive])).flip(0)
    false = len(negative) - torch.searchsorted(negative, distinct)
    true = len(positive) - torch.searchsorted(positive, distinct)
    zero = torch.zeros(1, dtype=torch.int64)
    infinity = torch.full((1,), torch.inf, dtype=torch.float64)
    return (
        torch.cat([zero, false]).double(),
        torch.cat([zero, true]).double(),
        torch.cat([infinity, distinct]),
    )
