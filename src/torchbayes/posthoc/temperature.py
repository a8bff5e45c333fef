"""Temperature scaling: one number that makes a classifier as sure as it is right.

Guo et al., "On calibration of modern neural networks", ICML 2017, section 4.2: p_T(y) ∝ p(y)^(1/T), with
the T > 0 of the least NLL on held-out examples. The most probable class, and so accuracy, stays.

Deviation from the paper: a posterior's prediction is an average of probabilities and has no logits; their
logarithms take their place. With one draw it is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbayes.posthoc._labels import checked
from torchbayes.predict.results import ClassPredictive

__all__ = ["TemperatureScaling", "temperature_scaling", "tempered"]

_COLDEST, _HOTTEST = 0.02, 50.0


def tempered(log_probs: Tensor, temperature: float) -> Tensor:
    """The log-probabilities log p_T with p_T(y) ∝ p(y)^(1/T)."""
    return (log_probs / temperature).log_softmax(1)


@dataclass(frozen=True)
class TemperatureScaling:
    """Predictions at another temperature; call it with new predictions.

    Attributes:
        temperature: T; above 1 makes predictions less sure.
    """

    temperature: float

    def __call__(self, predictive: ClassPredictive) -> ClassPredictive:
        """The same predictions at this temperature; the aleatoric share of the entropy stays."""
        log_probs = predictive.probs.double().clamp_min(torch.finfo(torch.float32).tiny).log()
        probs = tempered(log_probs, self.temperature).exp().to(predictive.probs.dtype)
        entropy: Tensor = torch.special.entr(probs).sum(1)
        share = (predictive.aleatoric / predictive.entropy).nan_to_num(1.0).clamp(0, 1)
        return ClassPredictive(probs, entropy * share, predictive.draws)


def temperature_scaling(predictive: ClassPredictive, targets: Tensor) -> TemperatureScaling:
    """Find the temperature of the least NLL.

    Args:
        predictive: Predictions of examples that were not trained on, such as a validation split.
        targets: Their classes.

    Returns:
        The scaling, to be called with predictions. T is kept within 0.02 and 50: where every example
        is predicted rightly, no temperature is the best.

    Example:
        >>> import torch, torchbayes as tb
        >>> sure = tb.ClassPredictive(torch.tensor([[0.99, 0.01]]).repeat(10, 1), torch.zeros(10), 1)
        >>> scale = tb.temperature_scaling(sure, torch.tensor([0] * 7 + [1] * 3))   # right 7 times in 10
        >>> round(float(scale(sure).confidence[0]), 3)
        0.7
    """
    from scipy.optimize import minimize_scalar  # late: it takes a third of a second to import

    probs, labels = checked(predictive, targets)
    log_probs = probs.clamp_min(torch.finfo(torch.float32).tiny).log()
    index = labels.unsqueeze(1)

    def nll(log_temperature: float) -> float:
        return -float(tempered(log_probs, math.exp(log_temperature)).gather(1, index).mean())

    # Convex in 1/T, so that there is one minimum to find.
    bounds = math.log(_COLDEST), math.log(_HOTTEST)
    found = minimize_scalar(nll, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return TemperatureScaling(math.exp(float(found.x)))
