"""Overlap of predicted and true regions, for maps of classes."""

import torch
from torch import Tensor

from torchbayes.metrics import _inputs


def iou(probs: Tensor, targets: Tensor) -> Tensor:
    """Compute the intersection over union of every class, (C,): NaN for a class that occurs in neither.

    Positions are counted over all examples together.

    Args:
        probs: Class probabilities (N, C, …).
        targets: Integer labels (N, …).

    Example:
        >>> import torch
        >>> probs = torch.tensor([[[0.9, 0.9, 0.2]], [[0.1, 0.1, 0.8]]]).movedim(0, 1)   # (1, 2, 3)
        >>> iou(probs, torch.tensor([[0, 1, 1]])).tolist()
        [0.5, 0.5]
    """
    probs, targets = _inputs.labelled(probs, targets)
    classes = probs.shape[1]
    # Row: true class, column: predicted class.
    pairs = torch.bincount(targets * classes + probs.argmax(1), minlength=classes**2)
    counts = pairs.reshape(classes, classes).double()
    both = counts.diagonal()
    return both / (counts.sum(0) + counts.sum(1) - both)


def mean_iou(probs: Tensor, targets: Tensor) -> float:
    """Compute the mean of `iou` over the classes that occur.

    Example:
        >>> import torch
        >>> mean_iou(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
        1.0
    """
    return float(iou(probs, targets).nanmean())
