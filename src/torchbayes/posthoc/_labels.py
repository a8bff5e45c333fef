"""Checks of the predictions and labels to fit on."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import ClassPredictive

__all__ = ["as_classes", "checked"]


def as_classes(predictive: ClassPredictive | BinaryPredictive) -> ClassPredictive:
    """Return class predictions as they are, and binary labels as two classes."""
    if isinstance(predictive, BinaryPredictive):
        return predictive.as_classes()
    if not isinstance(predictive, ClassPredictive):
        raise TypeError(
            f"predictions are a {type(predictive).__name__}: expected class predictions, as "
            "torchbayes.predictive returns for a classifier"
        )
    return predictive


def checked(
    predictive: ClassPredictive | BinaryPredictive, targets: Tensor, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """Return the probabilities (rows, classes) in float64 and the labels, both checked.

    Every position of a map and every binary label is a row, except those that are ignored.
    """
    classes = as_classes(predictive)
    last = classes.probs.double().movedim(1, -1)
    probs, labels = last.flatten(0, -2), torch.as_tensor(targets).to(last.device)
    if isinstance(predictive, BinaryPredictive) and labels.numel() == len(probs):
        labels = labels.reshape(last.shape[:-1]).long()  # (n,) and (n, 1) are the same, 1.0 is a 1
    if labels.shape != last.shape[:-1] or labels.numel() == 0:
        raise ValueError(
            f"targets have shape {tuple(labels.shape)} for predictions of {tuple(last.shape[:-1])} labels: "
            "give one label for each, and at least one"
        )
    labels = labels.flatten()
    if ignore_index is not None:
        known = labels != ignore_index
        probs, labels = probs[known], labels[known]
        if len(labels) == 0:
            raise ValueError(f"every target is {ignore_index}, the ignored label: label some")
    if labels.is_floating_point() or int(labels.min()) < 0 or int(labels.max()) >= probs.shape[1]:
        raise ValueError(
            f"targets are not labels of the {probs.shape[1]} classes: give whole numbers from 0 to "
            f"{probs.shape[1] - 1}, and as ignore_index the label of what is not labelled"
        )
    return probs, labels.long()
