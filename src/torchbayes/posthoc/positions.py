"""Maps of classes as rows: each position of a map, such as a pixel, is one prediction."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbayes.predict.results import ClassPredictive

__all__ = ["position_rows"]

_MOST = 100_000  # positions to keep for scores and pictures: a standard error of 0.2 points at most


def position_rows(
    predictive: ClassPredictive, targets: Tensor, ignore_index: int | None = None
) -> tuple[ClassPredictive, Tensor]:
    """Return predictions (rows, classes) and labels (rows,) of the positions that are not ignored.

    If there are more than 100,000, that many are drawn, with seed 0.

    Args:
        predictive: Predictions, with probabilities (examples, classes, …).
        targets: Labels (examples, …).
        ignore_index: Label of positions to leave out, or None.

    Example:
        >>> import torch
        >>> maps = ClassPredictive(torch.full((2, 3, 4, 5), 1 / 3), torch.zeros(2, 4, 5), 1)
        >>> rows, labels = position_rows(maps, torch.zeros(2, 4, 5, dtype=torch.long))
        >>> rows.probs.shape, rows.aleatoric.shape, labels.shape
        (torch.Size([40, 3]), torch.Size([40]), torch.Size([40]))
    """
    if predictive.probs.dim() == 2 and ignore_index is None:
        return predictive, targets
    labels = targets.flatten()
    known = torch.ones_like(labels, dtype=torch.bool)
    if ignore_index is not None:
        known = labels != ignore_index
    index = known.nonzero().squeeze(1)
    if len(index) > _MOST:
        order = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))
        index = index[order[:_MOST].to(index.device)].sort().values
    probs = predictive.probs.movedim(1, -1).flatten(0, -2)
    at = index.to(probs.device)
    kept = ClassPredictive(probs[at], predictive.aleatoric.flatten()[at], predictive.draws)
    return kept, labels[index]
