"""Score a finished run and write the results to its folder.

predictions.npz     predictions for the test set and for out-of-distribution inputs
regression.npz      the same for a regression
draws.json          a classifier's scores with the first 1, 2, 4, … draws
corruptions.json    scores on corrupted test images, if asked for
scores.json         all other scores, and the cost of the run
about.json          names for the report: the classes, and the out-of-distribution inputs
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchbayes import metrics
from torchbayes.core.storage import write_json
from torchbayes.data import DataSet, OutOfDistribution, noise_for, ood_for
from torchbayes.data.transform import Normalise
from torchbayes.experiments.cost import read_peak, stored_numbers
from torchbayes.experiments.made_with import made_with, scored_on
from torchbayes.experiments.robustness import corruption_scores
from torchbayes.experiments.saved_predictions import Predictions, RegressionPredictions
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.predict.results import ClassPredictive, RegressionPredictive
from torchbayes.predict.running import RunningCategorical, RunningPredictive

__all__ = ["evaluate", "finite", "in_units", "scored_with"]

_CORRUPTION_DRAWS = 16  # for 31 times the images: enough to compare methods, in half the time of 32


def evaluate(
    run: TrainedRun,
    samples: int | None = None,
    ood: OutOfDistribution | None = None,
    *,
    last: bool = False,
    corruptions: bool = False,
) -> dict[str, float | None]:
    """Score a run on its test set, and write predictions and scores to its folder.

    Args:
        run: Run to score.
        samples: Number of draws, by default the run's own setting.
        ood: Out-of-distribution inputs, by default the usual ones for the data.
        last: Score a sampler's last sample alone, and write the files to the subfolder `last`.
        corruptions: Also score corrupted test images.
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
        ignored = getattr(run.likelihood(), "ignore_index", None)
        if test.probs.dim() > 2:
            extra["mean_iou"] = metrics.mean_iou(*metrics.rows(test.probs, targets, ignored))
        predictions = Predictions.of(test, targets, other, ignored)
        predictions.save(folder / "predictions.npz")
        write_json(folder / "draws.json", {"rows": _scores_by_draws(test, targets, ignored)})
        noise = noise_for(data)
        if noise is not None:
            blank = run.predict(normalise(noise.inputs, torch.Generator()), samples, last=last)
            assert isinstance(blank, ClassPredictive)
            extra["auroc_noise"] = metrics.auroc(test.entropy.flatten(), blank.entropy.flatten())
    else:
        assert isinstance(test, RegressionPredictive)
        assert isinstance(other, RegressionPredictive)
        if data.encoding is not None:
            extra = _standardised_scores(test, targets)
            other, _ = in_units(data, other, targets)
            test, targets = in_units(data, test, targets)
        predictions = RegressionPredictions.of(test, targets, other)
        predictions.save(folder / "regression.npz")
    scores = {key: finite(value) for key, value in (predictions.scores() | extra).items()}
    scores |= _cost(run, last)
    made = scored_with(run, samples, last=last, ood=ood)
    if corruptions:
        draws = min(_CORRUPTION_DRAWS, run.experiment.samples if samples is None else samples)
        damaged = corruption_scores(lambda batches: run.predict(batches, draws, last=last), data)
        write_json(folder / "corruptions.json", {**damaged, "draws": draws, "made_with": made})
    notes = [data.note, f"Out of distribution: {ood.note}."]
    about = {"classes": list(data.classes), "ood": ood.name, "notes": list(filter(None, notes))}
    write_json(folder / "about.json", about)
    write_json(folder / "scores.json", {**scores, "made_with": made})
    return scores


def scored_with(
    run: TrainedRun,
    samples: int | None = None,
    *,
    last: bool = False,
    ood: OutOfDistribution | None = None,
) -> dict[str, Any]:
    """Return what scores with these arguments are made with, those of `evaluate` if there is an `ood`."""
    draws = run.experiment.samples if samples is None else samples
    return made_with(run.files, samples=draws, last=last, **scored_on(run.data, ood))


def in_units(
    data: DataSet, predictive: RegressionPredictive, targets: Tensor
) -> tuple[RegressionPredictive, Tensor]:
    """Return predictions and targets of a regression in the target's units, if training had others."""
    if data.encoding is None:
        return predictive, targets
    mean, std = data.encoding.mean, data.encoding.std
    return predictive.rescaled(mean, std), targets.double() * std + mean


def _standardised_scores(test: RegressionPredictive, targets: Tensor) -> dict[str, float]:
    """Score predictions in the units that the network was trained in: NLL less the log of the scale."""
    scores = RegressionPredictions.of(test, targets).scores()
    return {f"{name}_standardised": scores[name] for name in ("rmse", "nll")}


def _cost(run: TrainedRun, last: bool) -> dict[str, float | None]:
    """Collect time, memory and storage; a single sample has its run's time and no memory figure."""
    rows, file = run.files.read_metrics(), run.files.path / "cost.json"
    seconds = float(rows[-1].get("seconds", 0.0)) if rows else None
    weights = float(sum(p.numel() for p in run.model.parameters()))
    cost: dict[str, float | None] = {"seconds": seconds, "parameters": weights}
    if last:
        return cost | {"stored": float(sum(t.numel() for t in run.last_sample().mean().values()))}
    cost["seconds_per_epoch"] = None if seconds is None else seconds / run.experiment.epochs
    cost["stored"] = float(stored_numbers(run.files.posterior_file))
    if file.exists():
        remedy = "remove it, and the scores leave the memory out"
        cost["peak_memory"] = float(read_peak(file, remedy))
    return cost


def _scores_by_draws(
    test: RunningPredictive, targets: Tensor, ignored: int | None
) -> list[dict[str, float]]:
    """Score the averages over the first 1, 2, 4, … draws."""
    table = []
    for draws, probs in test.stages.items():
        rows = metrics.rows(probs, targets, ignored)
        table.append(
            {"draws": draws, "nll": metrics.nll(*rows), "accuracy": metrics.accuracy(*rows)}
        )
    return table


def finite(value: float) -> float | None:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return value if math.isfinite(value) else None
