"""When to abstain: a confidence below which to hand over, so that what is answered is right often enough.

Geifman and El-Yaniv, "Selective classification for deep neural networks", NeurIPS 2017 (selection with
guaranteed risk). Answer the m most confident of n calibration examples, e of them wrong: the errors of
new examples that pass the same threshold have a rate of at most the Clopper–Pearson bound B(e, m, δ) with
probability 1 − δ. Taken is the largest m for which the bound is at most the risk asked for.

Deviation from the paper: its binary search over m is a grid of 20 shares, with δ/20 for each, because
the bound is not monotone in m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torchbayes.posthoc._labels import checked
from torchbayes.predict.results import ClassPredictive

__all__ = ["Abstention", "decide", "risk_bound"]

_SHARES = 20


def risk_bound(errors: int, answered: int, delta: float) -> float:
    """The error rate that `errors` of `answered` exclude at level δ: Clopper and Pearson's upper bound."""
    from scipy.special import betaincinv  # late: it takes a third of a second to import

    if errors >= answered:
        return 1.0
    return float(betaincinv(errors + 1, answered - errors, 1 - delta))


@dataclass(frozen=True)
class Abstention:
    """A rule that says which predictions to answer; call it with new predictions.

    Attributes:
        risk: The share of answers that may be wrong.
        threshold: An example is answered if its confidence is above this; infinite if no threshold
            can promise the risk, so that nothing is answered.
        coverage: The share of the calibration examples that it answers.
        bound: What the risk is at most, with the probability asked for.
    """

    risk: float
    threshold: float
    coverage: float
    bound: float

    def __call__(self, predictive: ClassPredictive) -> Tensor:
        """Which examples to answer, (examples,) of truth values; on the others, abstain."""
        return predictive.confidence.double() > self.threshold


def decide(
    predictive: ClassPredictive, targets: Tensor, risk: float = 0.05, probability: float = 0.95
) -> Abstention:
    """Find the lowest threshold on confidence that keeps the error rate of the answers to `risk`.

    A promise needs examples: with no error at all, a risk of 1 % takes about 600 calibration examples.

    Args:
        predictive: Predictions of examples that were not trained on.
        targets: Their classes.
        risk: The share of answers that may be wrong.
        probability: The probability, over the choice of calibration examples, that it is kept.

    Example:
        >>> import torch, torchbayes as tb
        >>> sure = torch.linspace(0.5, 1, 1000)
        >>> p = tb.ClassPredictive(torch.stack([sure, 1 - sure], 1), torch.zeros(1000), 1)
        >>> right = sure > 0.75                    # it is wrong wherever it is less sure than 0.75
        >>> rule = tb.decide(p, (~right).long(), risk=0.02)
        >>> rule.coverage
        0.5
    """
    for name, value in (("risk", risk), ("probability", probability)):
        if not 0 < value < 1:
            raise ValueError(f"{name} is {value:g}: expected a share between 0 and 1")
    probs, labels = checked(predictive, targets)
    confidence, order = predictive.confidence.double().sort(descending=True, stable=True)
    wrong = (probs.argmax(1) != labels)[order].cumsum(0)
    count = len(confidence)
    for step in range(_SHARES, 0, -1):
        answered = count * step // _SHARES
        # The threshold is the confidence of the first that is not answered; ties of it are not either.
        threshold = float(confidence[answered]) if answered < count else 0.0
        above = int((confidence > threshold).sum())
        if above == 0:
            continue
        bound = risk_bound(int(wrong[above - 1]), above, (1 - probability) / _SHARES)
        if bound <= risk:
            return Abstention(risk, threshold, above / count, bound)
    return Abstention(risk, math.inf, 0.0, 0.0)
