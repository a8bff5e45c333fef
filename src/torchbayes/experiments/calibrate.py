"""Calibrate a finished run; writes calibration.json to its folder.

It holds the figures of `torchbayes.posthoc.calibration`, and what they were fitted and scored on:

    {"fitted_on": "the validation split" | "half of the test split",
     "scored_on": "the test split" | "the other half of the test split", …}
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchbayes import posthoc
from torchbayes.data import ImageFolder, Split
from torchbayes.experiments.evaluation import in_units, scored_with
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.posthoc import Calibration
from torchbayes.predict.results import Predictive, RegressionPredictive

__all__ = ["calibrate"]


def calibrate(
    run: TrainedRun,
    *,
    coverages: Sequence[float] = (0.8, 0.9, 0.95),
    risks: Sequence[float] = (0.01, 0.02, 0.05),
    samples: int | None = None,
) -> Calibration:
    """Fit temperature, prediction sets and abstention, or intervals, and write calibration.json.

    They are fitted on the run's validation split and scored on its test split. Without a validation split,
    one half of the test split, drawn with seed 0, is used for fitting and the other half for scoring.

    Args:
        run: Finished run.
        coverages: Target coverages of prediction sets and intervals.
        risks: Target risks of abstention, for a classifier.
        samples: Number of draws, by default the run's own setting.

    Returns:
        The calibration, whose figures are the content of calibration.json.
    """
    ignored = getattr(run.likelihood(), "ignore_index", None)
    test = _predicted(run, run.data.test, samples)
    if run.data.validation is not None:
        fitted = _predicted(run, run.data.validation, samples)
        found = posthoc.calibrate(
            *fitted, *test, coverages=coverages, risks=risks, ignore_index=ignored
        )
        names = "the validation split", "the test split"
    else:
        found = posthoc.calibrate(*test, coverages=coverages, risks=risks, ignore_index=ignored)
        names = "half of the test split", "the other half of the test split"
    result = {"fitted_on": names[0], "scored_on": names[1], **found.figures}
    run.files.write_calibration(result, scored_with(run, samples))
    return Calibration.of(result)


def _predicted(
    run: TrainedRun, split: Split | ImageFolder, samples: int | None
) -> tuple[Predictive, Tensor]:
    predictive, targets = run.predict_split(split, samples)
    if isinstance(predictive, RegressionPredictive):
        return in_units(run.data, predictive, targets)
    return predictive, targets
