"""Scores under shift: accuracy, NLL and calibration on corrupted test images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchbayes.data import CORRUPTIONS, DataSet, Split, corrupt
from torchbayes.data.corruptions import CORRUPTION_NOTE, SEVERITIES
from torchbayes.data.images import read_images
from torchbayes.data.transform import Normalise
from torchbayes.metrics.scores import probability_scores
from torchbayes.predict.results import Predictive

__all__ = ["corruption_scores"]


def corruption_scores(
    predict: Callable[[Iterator[Tensor]], Predictive], data: DataSet, examples: int = 1000
) -> dict[str, Any]:
    """Score a classifier on every kind and severity of corruption, and on the clean images.

    All are predicted in one call, so that the weights are drawn once.

    Args:
        predict: Predicts batches of normalised inputs with class probabilities.
        data: Data set of images.
        examples: Number of test images to use, evenly spaced: 31 sets of them are predicted.

    Returns:
        `note`, `examples`, the scores of the `clean` images, and under `kinds` for each kind a list of
        scores from severity 1 to 5.
    """
    if len(data.shape) != 3 or not data.classes:
        raise ValueError(f"{data.name} has no labelled images to corrupt: leave out --corruptions")
    images, targets = _images(data, examples)
    normalise = Normalise(data.mean, data.std)
    sets = [(kind, severity) for kind in CORRUPTIONS for severity in SEVERITIES]

    def batches() -> Iterator[Tensor]:
        yield normalise(images)
        for kind, severity in sets:
            yield normalise(corrupt(images, kind, severity))

    result = predict(batches())
    probs: Tensor = result.probs  # type: ignore[attr-defined]
    clean, *damaged = (
        probability_scores(part, targets) for part in probs.cpu().split(len(targets))
    )
    kinds: dict[str, list[dict[str, float]]] = {kind: [] for kind in CORRUPTIONS}
    for (kind, severity), scores in zip(sets, damaged, strict=True):
        kinds[kind].append({"severity": severity, **scores})
    return {"note": CORRUPTION_NOTE, "examples": len(targets), "clean": clean, "kinds": kinds}


def _images(data: DataSet, examples: int) -> tuple[Tensor, Tensor]:
    total = len(data.test)
    index = torch.arange(0, total, max(1, -(-total // examples)))
    targets = torch.as_tensor(data.test.targets)[index]
    if isinstance(data.test, Split):
        return data.test.inputs[index], targets
    paths = [data.test.path(int(i)) for i in index]
    return read_images(paths, data.test.shape), targets
