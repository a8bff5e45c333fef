"""Calibrate a finished run; writes calibration.json to its folder.

    {
      "fitted_on": "the validation split" | "half of the test split",
      "fitted": number of examples, "scored_on": "the test split" | "the other half …", "scored": number,
      "temperature": {"value": T, "before": {"accuracy", "nll", "ece"}, "after": {the same}},
      "conformal": [{"target", "threshold", "coverage", "mean_size", "empty"}, …],
      "abstention": [{"target", "probability", "threshold", "coverage", "risk"}, …]
    }

All figures but thresholds and T are measured on the scored examples, to which nothing was fitted.
"coverage" is a share of examples (those whose set contains the true class; those that are answered),
"mean_size" the number of classes per set, "empty" the share of empty sets. A threshold is null if it is
infinite, a "risk" if nothing is answered. Sets and abstention use the predictions before temperature
scaling: a scaling fitted to the same examples would void the guarantees. In a run on maps of classes, every
position counts as an example, and at most 100,000 are used.

A regression has, instead of the last three,
    {"intervals": [{"score": null | "residual" | "quantile", "target", "coverage", "width"}, …]}
with the mean width of the intervals, in the target's units; those with the score null are the predictive's
own, uncorrected. "width" is null if it is infinite. The outputs of an example are counted one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.storage import write_json
from torchbayes.experiments.evaluation import finite, in_units, scored_with
from torchbayes.experiments.positions import position_rows
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.metrics.scores import probability_scores
from torchbayes.posthoc.abstain import abstain
from torchbayes.posthoc.conformal import conformal_intervals, conformal_sets
from torchbayes.posthoc.temperature import temperature_scaling
from torchbayes.predict.results import (
    ClassPredictive,
    RegressionPredictive,
    like_predictions,
)

__all__ = ["calibrate", "calibration_figures", "interval_figures"]

_PROBABILITY = 0.95


def calibrate(
    run: TrainedRun,
    *,
    coverages: Sequence[float] = (0.8, 0.9, 0.95),
    risks: Sequence[float] = (0.01, 0.02, 0.05),
    samples: int | None = None,
) -> dict[str, Any]:
    """Fit temperature, prediction sets and abstention, or intervals, and write calibration.json.

    They are fitted on the run's validation split and scored on its test split. Without a validation split,
    one half of the test split, drawn with seed 0, is used for fitting and the other half for scoring.

    Args:
        run: Finished run.
        coverages: Target coverages of prediction sets and intervals.
        risks: Target risks of abstention, for a classifier.
        samples: Number of draws, by default the run's own setting.

    Returns:
        The content of calibration.json.
    """
    test, targets = run.predict_split(run.data.test, samples)
    if run.data.validation is not None:
        fitted, fitted_targets = run.predict_split(run.data.validation, samples)
        names = "the validation split", "the test split"
    else:
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
        one, other = order[: len(order) // 2], order[len(order) // 2 :]
        fitted, fitted_targets = test.subset(one), targets[one]
        test, targets = test.subset(other), targets[other]
        names = "half of the test split", "the other half of the test split"
    if isinstance(fitted, RegressionPredictive) and isinstance(test, RegressionPredictive):
        table = interval_figures(
            *in_units(run.data, fitted, fitted_targets),
            *in_units(run.data, test, targets),
            coverages,
        )
    else:
        assert isinstance(fitted, ClassPredictive)
        assert isinstance(test, ClassPredictive)
        ignored = getattr(run.likelihood(), "ignore_index", None)
        table = calibration_figures(
            *position_rows(fitted, fitted_targets, ignored),
            *position_rows(test, targets, ignored),
            coverages,
            risks,
        )
    result = {"fitted_on": names[0], "scored_on": names[1], **table}
    write_json(
        run.files.path / "calibration.json", {**result, "made_with": scored_with(run, samples)}
    )
    return result


def calibration_figures(
    fitted: ClassPredictive,
    fitted_labels: Tensor,
    scored: ClassPredictive,
    labels: Tensor,
    coverages: Sequence[float],
    risks: Sequence[float],
) -> dict[str, Any]:
    """Compute the part of calibration.json that depends on the predictions alone."""
    scaling = temperature_scaling(fitted, fitted_labels)
    right = scored.prediction == labels
    conformal: list[dict[str, Any]] = []
    for target in coverages:
        rule = conformal_sets(fitted, fitted_labels, target)
        sets = rule(scored)
        sizes = sets.sum(1).double()
        conformal.append(
            {
                "target": target,
                "threshold": finite(rule.threshold),
                "coverage": float(sets.gather(1, labels.unsqueeze(1)).double().mean()),
                "mean_size": float(sizes.mean()),
                "empty": float((sizes == 0).double().mean()),
            }
        )
    abstention: list[dict[str, Any]] = []
    for target in risks:
        answer = abstain(fitted, fitted_labels, target, _PROBABILITY)
        answered = answer(scored)
        abstention.append(
            {
                "target": target,
                "probability": _PROBABILITY,
                "threshold": finite(answer.threshold),
                "coverage": float(answered.double().mean()),
                "risk": finite(
                    1 - float(right[answered].double().mean())
                ),  # NaN if none is answered
            }
        )
    return {
        "fitted": len(fitted),
        "scored": len(scored),
        "temperature": {
            "value": scaling.temperature,
            "before": probability_scores(scored.probs, labels),
            "after": probability_scores(scaling(scored).probs, labels),
        },
        "conformal": conformal,
        "abstention": abstention,
    }


def interval_figures(
    fitted: RegressionPredictive,
    fitted_targets: Tensor,
    scored: RegressionPredictive,
    targets: Tensor,
    coverages: Sequence[float],
) -> dict[str, Any]:
    """Compute the part of a regression's calibration.json that depends on the predictions alone."""
    wanted = like_predictions(targets, scored.mean.shape).double()
    rows: list[dict[str, Any]] = []
    for target in coverages:
        own = [scored.quantile(0.5 + side * target / 2).double() for side in (-1, 1)]
        found: list[tuple[str | None, Tensor, Tensor]] = [(None, own[0], own[1])]
        for score in ("residual", "quantile"):
            rule = conformal_intervals(fitted, fitted_targets, target, score)
            found.append((score, *rule(scored)))
        rows += [
            {
                "score": score,
                "target": target,
                "coverage": float(((lower <= wanted) & (wanted <= upper)).double().mean()),
                "width": finite(float((upper - lower).mean())),
            }
            for score, lower, upper in found
        ]
    return {"fitted": len(fitted), "scored": len(scored), "intervals": rows}
