"""Diversity of the errors of several networks: double and multiple faults.

References:
    Giacinto and Roli, "Design of effective neural network ensembles for image classification purposes",
    Image and Vision Computing 2001 (double fault).
    Ukai et al., "Bayesian estimation and model averaging of convolutional neural networks by
    hypernetwork", NOLTA 2019, section 5.2 and Table V (quadruple fault).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchbayes.metrics._inputs import real

__all__ = ["double_fault", "fault_counts"]


def fault_counts(predictions: Tensor, targets: Tensor) -> list[int]:
    """Count the examples that exactly 0, 1, …, M of M networks misclassify.

    Many examples in the middle mean diverse networks; many at the end mean correlated errors.

    Args:
        predictions: Predicted classes, (networks, examples).
        targets: True classes, (examples,).

    Returns:
        M + 1 counts that sum to the number of examples.

    Example:
        >>> fault_counts(torch.tensor([[0, 1, 1], [0, 0, 1]]), torch.tensor([0, 1, 0]))
        [1, 1, 1]
    """
    wrong = _wrong(predictions, targets)
    counts: list[int] = wrong.sum(0).bincount(minlength=len(wrong) + 1).tolist()
    return counts


def double_fault(predictions: Tensor, targets: Tensor) -> float:
    """Compute the fraction of examples that both of two networks misclassify, averaged over all pairs.

    Args:
        predictions: Predicted classes, (networks, examples), of two networks or more.
        targets: True classes, (examples,).

    Example:
        >>> double_fault(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]]), torch.tensor([0, 1, 0, 0]))
        0.25
    """
    wrong = _wrong(predictions, targets).double()
    if len(wrong) < 2:
        raise ValueError("double_fault needs the predictions of two networks or more, got one")
    together = wrong @ wrong.t() / wrong.shape[1]
    pairs = torch.triu_indices(len(wrong), len(wrong), offset=1)
    return float(together[pairs[0], pairs[1]].mean())


def _wrong(predictions: Tensor, targets: Tensor) -> Tensor:
    predictions, targets = real(predictions, "predictions"), real(targets, "targets")
    if predictions.ndim != 2 or targets.ndim != 1 or predictions.shape[1:] != targets.shape:
        raise ValueError(
            f"predictions has shape {tuple(predictions.shape)} and targets {tuple(targets.shape)}, expected "
            "(networks, examples) and (examples,)"
        )
    if predictions.numel() == 0:
        raise ValueError("predictions is empty, expected at least one network and one example")
    return (predictions != targets).long()
