"""Checks of the predictions and labels to fit on."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbayes.predict.results import ClassPredictive

__all__ = ["checked"]


def checked(predictive: ClassPredictive, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities (examples, classes) in float64 and the labels, both checked."""
    if not isinstance(predictive, ClassPredictive):
        raise TypeError(
            f"predictions are a {type(predictive).__name__}: expected class predictions, as "
            "torchbayes.predictive returns for a classifier"
        )
    probs, labels = predictive.probs.double(), torch.as_tensor(targets).to(predictive.probs.device)
    if probs.dim() != 2:
        raise ValueError(
            f"probabilities have shape {tuple(probs.shape)}: expected (examples, classes); flatten "
            "the positions of an example first"
        )
    if labels.shape != probs.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"targets have shape {tuple(labels.shape)} for predictions on {len(probs)} examples: give "
            "one label for each, and at least one"
        )
    if labels.is_floating_point() or int(labels.min()) < 0 or int(labels.max()) >= probs.shape[1]:
        raise ValueError(
            f"targets are not labels of the {probs.shape[1]} classes: give whole numbers from 0 to "
            f"{probs.shape[1] - 1}"
        )
    return probs, labels.long()
