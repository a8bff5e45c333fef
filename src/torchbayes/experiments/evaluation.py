"""Scores of a finished run, and the files that they leave in its folder.

predictions.npz     what it predicts for the test set and for out-of-distribution inputs
regression.npz      the same for a regression
draws.json          a classifier's scores with the first 1, 2, 4, … draws
corruptions.json    the scores on damaged test images, if asked for
scores.json         everything else, and what the run cost
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchbayes import metrics
from torchbayes.core.storage import write_text
from torchbayes.data import OutOfDistribution, noise_for, ood_for
from torchbayes.data.transform import Normalise
from torchbayes.experiments.cost import stored_numbers
from torchbayes.experiments.robustness import corruption_scores
from torchbayes.experiments.saved_predictions import Predictions, RegressionPredictions
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.predict.results import ClassPredictive, RegressionPredictive
from torchbayes.predict.running import RunningCategorical, RunningPredictive

__all__ = ["evaluate", "finite", "write_json"]

_DAMAGED_DRAWS = 16  # for 31 times the images: enough to tell methods apart, at half the time of 32


def evaluate(
    run: TrainedRun,
    samples: int | None = None,
    ood: OutOfDistribution | None = None,
    *,
    last: bool = False,
    corruptions: bool = False,
) -> dict[str, float | None]:
    """Score a run on its test set, and keep predictions and scores in its folder.

    Args:
        run: The run.
        samples: The draws to predict with; the run's own setting if None.
        ood: The out-of-distribution inputs; the usual ones for the data if None.
        last: Score the last of a sampler's samples alone, and keep the files in the folder `last`.
        corruptions: Score damaged test images too.
    """
    data = run.data
    ood = ood_for(data, run.data_dir) if ood is None else ood
    normalise = Normalise(data.mean, data.std)
    running = RunningCategorical() if data.classes else None
    test, targets = run.predict_split(data.test, samples, last=last, likelihood=running)
    other = run.predict(normalise(ood.inputs, torch.Generator()), samples, last=last)
    folder = run.files.path / "last" if last else run.files.path
    folder.mkdir(exist_ok=True)
    predictions: Predictions | RegressionPredictions
    extra: dict[str, float] = {}
    if isinstance(test, RunningPredictive):
        assert isinstance(other, ClassPredictive)
        predictions = Predictions.of(test, targets, other)
        predictions.save(folder / "predictions.npz")
        write_json(folder / "draws.json", _course(test, targets))
        noise = noise_for(data)
        if noise is not None:
            blank = run.predict(normalise(noise.inputs, torch.Generator()), samples, last=last)
            assert isinstance(blank, ClassPredictive)
            extra["auroc_noise"] = metrics.auroc(test.entropy, blank.entropy)
    else:
        assert isinstance(test, RegressionPredictive)
        assert isinstance(other, RegressionPredictive)
        predictions = RegressionPredictions.of(test, targets, other)
        predictions.save(folder / "regression.npz")
    scores = {key: finite(value) for key, value in (predictions.scores() | extra).items()}
    scores |= _cost(run, last)
    if corruptions:
        draws = min(_DAMAGED_DRAWS, run.experiment.samples if samples is None else samples)
        damaged = corruption_scores(lambda batches: run.predict(batches, draws, last=last), data)
        write_json(folder / "corruptions.json", damaged | {"draws": draws})
    write_json(folder / "scores.json", scores)
    return scores


def _cost(run: TrainedRun, last: bool) -> dict[str, float | None]:
    """Time, memory and storage; one sample of a run shares its time and has no memory of its own."""
    rows, file = run.files.read_metrics(), run.files.path / "cost.json"
    seconds = float(rows[-1]["seconds"]) if rows else None
    weights = float(sum(p.numel() for p in run.model.parameters()))
    cost: dict[str, float | None] = {"seconds": seconds, "parameters": weights}
    if last:
        return cost | {"stored": float(sum(t.numel() for t in run.last_sample().mean().values()))}
    cost["seconds_per_epoch"] = None if seconds is None else seconds / run.experiment.epochs
    cost["stored"] = float(stored_numbers(run.files.posterior_file))
    if file.exists():
        cost["peak_memory"] = float(json.loads(file.read_text("utf-8"))["peak_memory"])
    return cost


def _course(test: RunningPredictive, targets: Tensor) -> list[dict[str, float]]:
    """The scores of the average over the first 1, 2, 4, … draws."""
    return [
        {
            "draws": draws,
            "nll": metrics.nll(probs, targets),
            "accuracy": metrics.accuracy(probs, targets),
        }
        for draws, probs in test.stages.items()
    ]


def write_json(file: Path, content: Any) -> None:
    """Write a table for people and programs to read."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity: what is undefined or unbounded is null."""
    return value if math.isfinite(value) else None
