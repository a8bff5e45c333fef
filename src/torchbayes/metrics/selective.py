"""Selective prediction: the error rate left after rejecting the least confident predictions.

Risk-coverage curves and their area as in Geifman, Uziel and El-Yaniv (2019, arXiv:1805.08206).
Equally confident examples have no preferred order, so each counts with the mean error of its tie:
the curve is exactly the expectation over a random order of the tied examples, and
does not depend on the order of rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchbayes.metrics import _inputs


class RiskCoverage(NamedTuple):
    """A risk-coverage curve with one point for each number of accepted examples; both (N,) float64.

    Attributes:
        coverage: Fraction of examples accepted, 1/N to 1, most confident first.
        risk: Error rate among the accepted.
    """

    coverage: Tensor
    risk: Tensor


def risk_coverage(confidence: Tensor, correct: Tensor) -> RiskCoverage:
    """Compute the risk-coverage curve, with ties handled as the module describes.

    Args:
        confidence: A score (N,), higher for more certain predictions; negate an uncertainty.
        correct: Whether each prediction is right (N,): bool, or 0 and 1.

    Example:
        >>> import torch
        >>> curve = risk_coverage(torch.tensor([0.9, 0.5, 0.5]), torch.tensor([True, True, False]))
        >>> curve.risk.tolist()
        [0.0, 0.25, 0.3333333333333333]
    """
    confidence = _inputs.scores(confidence, "confidence")
    correct = _inputs.scores(correct, "correct")
    _inputs.same_shape(correct, "correct", confidence, "confidence")
    if len(confidence) == 0:
        raise ValueError("confidence is empty, expected at least one example to score")
    if not bool(((correct == 0) | (correct == 1)).all()):
        raise ValueError(
            "correct holds values other than 0 and 1, expected whether each prediction is right: "
            "pass predictions == targets"
        )
    _, tie, size = torch.unique(-confidence, return_inverse=True, return_counts=True)
    errors = torch.bincount(tie, 1 - correct)
    expected = (errors / size).repeat_interleave(size)
    accepted = torch.arange(1, len(confidence) + 1, dtype=torch.float64)
    return RiskCoverage(accepted / len(confidence), expected.cumsum(0) / accepted)


def aurc(confidence: Tensor, correct: Tensor) -> float:
    """Compute the area under the risk-coverage curve: mean risk over the N coverages; lower is better.

    The arguments are those of `risk_coverage`.

    Example:
        >>> import torch
        >>> aurc(torch.tensor([0.9, 0.5]), torch.tensor([True, False]))
        0.25
    """
    return float(risk_coverage(confidence, correct).risk.mean())


def excess_aurc(confidence: Tensor, correct: Tensor) -> float:
    """Compute the E-AURC: `aurc` minus that of the best order of the predictions, right ones first.

    The arguments are those of `risk_coverage`.

    Example:
        >>> import torch
        >>> excess_aurc(torch.tensor([0.9, 0.5]), torch.tensor([True, False]))
        0.0
    """
    return aurc(confidence, correct) - aurc(correct, correct)
