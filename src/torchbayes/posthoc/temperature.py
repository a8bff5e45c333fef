"""Temperature scaling: one number that matches a classifier's confidence to its accuracy.

Guo et al., "On calibration of modern neural networks", ICML 2017, section 4.2: p_T(y) ∝ p(y)^(1/T), with
the T > 0 that minimises the NLL on held-out examples. The most probable class, and so accuracy, is unchanged.

Deviation from the paper: a posterior's prediction is an average of probabilities and has no logits; the
logarithms of the probabilities replace them. With one draw the two are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from torchbayes.posthoc._labels import checked
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import ClassPredictive

__all__ = ["TemperatureScaling", "temperature_scaling", "tempered"]

_COLDEST, _HOTTEST = 0.02, 50.0


def tempered(log_probs: Tensor, temperature: float) -> Tensor:
    """Return log p_T with p_T(y) ∝ p(y)^(1/T)."""
    return (log_probs / temperature).log_softmax(1)


@dataclass(frozen=True)
class TemperatureScaling:
    """A rule that rescales predictions to another temperature; call it with new predictions.

    Attributes:
        temperature: T; above 1 lowers the confidence.
    """

    temperature: float

    @overload
    def __call__(self, predictive: ClassPredictive) -> ClassPredictive: ...
    @overload
    def __call__(self, predictive: BinaryPredictive) -> BinaryPredictive: ...
    def __call__(
        self, predictive: ClassPredictive | BinaryPredictive
    ) -> ClassPredictive | BinaryPredictive:
        """Return the predictions at this temperature; the aleatoric share of the entropy is unchanged."""
        if isinstance(predictive, BinaryPredictive):
            two = self(predictive.as_classes())
            return BinaryPredictive(two.probs[:, 1], two.aleatoric, two.draws, two.probs[:, 0])
        log_probs = predictive.probs.double().clamp_min(torch.finfo(torch.float32).tiny).log()
        probs = tempered(log_probs, self.temperature).exp().to(predictive.probs.dtype)
        entropy: Tensor = torch.special.entr(probs).sum(1)
        share = (predictive.aleatoric / predictive.entropy).nan_to_num(1.0).clamp(0, 1)
        return ClassPredictive(probs, entropy * share, predictive.draws)


def temperature_scaling(
    predictive: ClassPredictive | BinaryPredictive,
    targets: Tensor,
    ignore_index: int | None = None,
) -> TemperatureScaling:
    """Find the temperature that minimises the NLL.

    Args:
        predictive: Predictions on examples that were not trained on, such as a validation split.
        targets: Classes of these examples, one for each position of a map.
        ignore_index: Label of what is not labelled, or None.

    Returns:
        The scaling, to be called with predictions. T is kept between 0.02 and 50: if every prediction
        is right, no temperature is optimal.

    Example:
        >>> import torch, torchbayes as tb
        >>> sure = tb.ClassPredictive(torch.tensor([[0.99, 0.01]]).repeat(10, 1), torch.zeros(10), 1)
        >>> right_7_times_in_10 = torch.tensor([0] * 7 + [1] * 3)
        >>> scale = tb.posthoc.temperature_scaling(sure, right_7_times_in_10)
        >>> round(float(scale(sure).confidence[0]), 3)
        0.7
    """
    # Imported here because SciPy takes half a second, which `import torchbayes` should not.
    from scipy.optimize import minimize_scalar

    probs, labels = checked(predictive, targets, ignore_index)
    log_probs = probs.clamp_min(torch.finfo(torch.float32).tiny).log()
    index = labels.unsqueeze(1)

    def nll(log_temperature: float) -> float:
        return -float(tempered(log_probs, math.exp(log_temperature)).gather(1, index).mean())

    # Convex in 1/T, so there is a single minimum.
    bounds = math.log(_COLDEST), math.log(_HOTTEST)
    found = minimize_scalar(nll, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return TemperatureScaling(math.exp(float(found.x)))
