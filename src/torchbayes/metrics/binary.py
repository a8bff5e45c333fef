"""Scores of binary labels: one per example, or several that do not exclude each other (multi-label)."""

import torch
from torch import Tensor

from torchbayes.metrics import _inputs
from torchbayes.metrics.calibration import ece
from torchbayes.metrics.classification import accuracy, brier, nll
from torchbayes.metrics.detection import aupr, auroc


def binary_scores(probs: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute all scores of binary labels.

    `accuracy`, `nll`, `brier` (over both classes, so twice the one-column score) and `ece` (15 bins, of
    the more probable label) are means over all labels; `exact` is the share of examples that have all labels
    right; `auroc` and `aupr` are means over those labels that are sometimes 1 and sometimes 0, or NaN.

    Args:
        probs: Probabilities of a 1, (N,) or (N, labels).
        targets: True labels, 0 or 1, of the same shape.

    Example:
        >>> import torch
        >>> table = binary_scores(torch.tensor([0.9, 0.6, 0.2]), torch.tensor([1, 0, 0]))
        >>> table["auroc"], round(table["accuracy"], 3)
        (1.0, 0.667)
    """
    probs, targets = _inputs.real(probs, "probs").double(), _inputs.real(targets, "targets")
    _inputs.same_shape(probs, "probs", targets, "targets")
    if probs.ndim not in (1, 2) or probs.numel() == 0:
        raise ValueError(
            f"probs has shape {tuple(probs.shape)}, expected (N,) or (N, labels): flatten further dimensions"
        )
    if not bool(((targets == 0) | (targets == 1)).all()):
        raise ValueError("targets holds values other than 0 and 1, expected binary labels")
    if not bool(((probs >= 0) & (probs <= 1)).all()):
        raise ValueError("probs leaves [0, 1], expected probabilities: apply sigmoid to logits")
    labels = targets.long()
    rows = torch.stack([1 - probs.flatten(), probs.flatten()], 1), labels.flatten()
    right = ((probs > 0.5) == (labels == 1)).reshape(len(probs), -1)
    columns = list(
        zip(probs.reshape(len(probs), -1).T, labels.reshape(len(probs), -1).T, strict=True)
    )
    groups = [(p[y == 0], p[y == 1]) for p, y in columns if 0 < int(y.sum()) < len(y)]
    return {
        "accuracy": accuracy(*rows),
        "exact": float(right.all(1).double().mean()),
        "nll": nll(*rows),
        "brier": brier(*rows),
        "ece": ece(*rows),
        "auroc": _mean([auroc(*group) for group in groups]),
        "aupr": _mean([aupr(*group) for group in groups]),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
