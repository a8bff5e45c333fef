"""Abstention: a confidence threshold below which not to answer, so that the answers are accurate enough.

Geifman and El-Yaniv, "Selective classification for deep neural networks", NeurIPS 2017 (selection with
guaranteed risk). Answer the m most confident of n calibration examples, e of them wrong: the error rate
of new examples that pass the same threshold is at most the Clopper–Pearson bound B(e, m, δ) with
probability 1 − δ. The largest m whose bound is at most the requested risk is chosen.

Deviation from the paper: its binary search over m is a grid of 20 shares, with δ/20 for each, because
the bound is not monotone in m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torchbayes.posthoc._labels import checked
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import ClassPredictive

__all__ = ["Abstention", "abstain", "risk_bound"]

_SHARES = 20


def risk_bound(errors: int, answered: int, delta: float) -> float:
    """Return the Clopper–Pearson upper bound at level δ on the error rate, after `errors` of `answered`."""
    # Imported here because SciPy takes half a second, which `import torchbayes` should not.
    from scipy.special import betaincinv

    if errors >= answered:
        return 1.0
    return float(betaincinv(errors + 1, answered - errors, 1 - delta))


@dataclass(frozen=True)
class Abstention:
    """A rule that decides which predictions to answer; call it with new predictions.

    Attributes:
        risk: Fraction of answers that may be wrong.
        threshold: An example is answered if its confidence is above this; infinite if no threshold
            can guarantee the risk, so that nothing is answered.
        coverage: Fraction of the calibration examples that it answers.
        bound: Upper bound on the risk, with the requested probability.
    """

    risk: float
    threshold: float
    coverage: float
    bound: float

    def __call__(self, predictive: ClassPredictive | BinaryPredictive) -> Tensor:
        """Return which examples (or positions) to answer, a boolean tensor; abstain on the others."""
        return predictive.confidence.double() > self.threshold


def abstain(
    predictive: ClassPredictive | BinaryPredictive,
    targets: Tensor,
    risk: float = 0.05,
    probability: float = 0.95,
    ignore_index: int | None = None,
) -> Abstention:
    """Find the lowest confidence threshold that keeps the error rate of the answers within `risk`.

    A guarantee needs examples: even without errors, a risk of 1 % takes about 600 calibration examples.
    Every position of a map counts as an example. Those of one map are not independent, so the risk is then
    kept on average over many maps, without the promised probability.

    Args:
        predictive: Predictions on examples that were not trained on.
        targets: Classes of these examples, one for each position of a map.
        risk: Fraction of answers that may be wrong.
        probability: Probability, over the choice of calibration examples, that the risk is kept.
        ignore_index: Label of what is not labelled, or None.

    Example:
        >>> import torch, torchbayes as tb
        >>> sure = torch.linspace(0.5, 1, 1000)
        >>> p = tb.ClassPredictive(torch.stack([sure, 1 - sure], 1), torch.zeros(1000), 1)
        >>> right = sure > 0.75                    # it is wrong wherever confidence is below 0.75
        >>> rule = tb.posthoc.abstain(p, (~right).long(), risk=0.02)
        >>> rule.coverage
        0.5
    """
    for name, value in (("risk", risk), ("probability", probability)):
        if not 0 < value < 1:
            raise ValueError(f"{name} is {value:g}: expected a number between 0 and 1")
    probs, labels = checked(predictive, targets, ignore_index)
    confidence, order = probs.amax(1).sort(descending=True, stable=True)
    wrong = (probs.argmax(1) != labels)[order].cumsum(0)
    count = len(confidence)
    for step in range(_SHARES, 0, -1):
        answered = count * step // _SHARES
        # The threshold is the confidence of the first unanswered example; its ties are unanswered too.
        threshold = float(confidence[answered]) if answered < count else 0.0
        above = int((confidence > threshold).sum())
        if above == 0:
            continue
        bound = risk_bound(int(wrong[above - 1]), above, (1 - probability) / _SHARES)
        if bound <= risk:
            return Abstention(risk, threshold, above / count, bound)
    return Abstention(risk, math.inf, 0.0, 0.0)
