"""All corrections of a run together, fitted to one part of held-out data and scored on another.

    {
      "fitted": number of examples, "scored": number,
      "temperature": {"value": T, "before": {"accuracy", "nll", "ece"}, "after": {the same}, "used": bool},
      "conformal": [{"target", "threshold", "coverage", "mean_size", "empty"}, …],
      "abstention": [{"target", "probability", "threshold", "coverage", "risk"}, …]
    }

All figures but thresholds and T are measured on the scored examples, to which nothing was fitted. "used" is
false if T made the NLL there worse: then the probabilities stay as they are. "coverage" is a share of
examples (those whose set contains the true class; those that are answered), "mean_size" the number of
classes per set, "empty" the share of empty sets. A threshold is null if it is infinite, a "risk" if nothing
is answered. Sets and abstention use the predictions before temperature scaling: a scaling fitted to the same
examples would void the guarantees. Of maps of classes, every position counts as an example, and at most
100,000 are used.

A regression has, instead of the last three,
    {"intervals": [{"score": null | "residual" | "quantile", "target", "coverage", "width", "margin"}, …]}
with the mean width of the intervals and what is added at both ends, by output, in the target's units; those
with the score null are the predictive's own, uncorrected. "width" is null if it is infinite, and so is a
margin. The outputs of an example are counted one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchbayes.metrics.scores import probability_scores
from torchbayes.posthoc._labels import as_classes
from torchbayes.posthoc.abstain import Abstention, abstain
from torchbayes.posthoc.conformal import (
    ConformalIntervals,
    ConformalSets,
    conformal_intervals,
    conformal_sets,
)
from torchbayes.posthoc.positions import position_rows
from torchbayes.posthoc.temperature import TemperatureScaling, temperature_scaling
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import (
    ClassPredictive,
    Predictive,
    RegressionPredictive,
    like_predictions,
)

__all__ = ["Calibration", "calibrate"]

_PROBABILITY = 0.95
_KEYS = {
    "fitted_on", "scored_on", "fitted", "scored", "temperature", "conformal", "abstention",
    "intervals",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Calibration:
    """The corrections of a run; call it with predictions to rescale their confidence.

    Attributes:
        figures: What was fitted and how well it does, as the module's docstring describes it: the content of
            a run folder's calibration.json.
        temperature: Rescales probabilities; None for a regression, and where it made the NLL worse.
        sets: Rules for sets of classes, by coverage.
        abstention: Rules for what to answer, by risk.
        intervals: Rules for intervals (the score is `"quantile"`), by coverage.

    The rules take predictions *before* temperature scaling, as `run.predict(…, calibrated=False)` gives them.

    Args:
        figures: The figures.

    Example:
        >>> import torch, torchbayes as tb
        >>> sure = tb.ClassPredictive(torch.tensor([[0.99, 0.01]]).repeat(40, 1), torch.zeros(40), 1)
        >>> often_wrong = torch.tensor([0, 0, 1] * 13 + [0])
        >>> calibration = tb.posthoc.calibrate(sure, often_wrong)
        >>> calibration
        Calibration(temperature 22.9, sets for 0.8, 0.9 and 0.95, abstention for risks 0.01, 0.02 and 0.05)
        >>> bool(calibration(sure).confidence[0] < 0.75)
        True
    """

    figures: Mapping[str, Any]
    temperature: TemperatureScaling | None
    sets: Mapping[float, ConformalSets]
    abstention: Mapping[float, Abstention]
    intervals: Mapping[float, ConformalIntervals]

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Calibration:
        """Return the calibration with these figures.

        Raises:
            ValueError: If they are not such figures.
        """
        strange = figures.keys() - _KEYS
        if strange:
            raise ValueError(f"a calibration has no figures {min(strange)!r}")
        try:
            scale = figures.get("temperature")
            used = scale is not None and bool(scale.get("used", True))
            rules = {float(r["target"]): r for r in figures.get("intervals", ()) if "margin" in r}
            return cls(
                dict(figures),
                TemperatureScaling(_above_0(scale["value"])) if scale is not None and used else None,
                {
                    float(row["target"]): ConformalSets(float(row["target"]), _number(row["threshold"]))
                    for row in figures.get("conformal", ())
                },
                {
                    float(row["target"]): Abstention(
                        float(row["target"]), _number(row["threshold"]), _number(row["coverage"]),
                        float(row.get("bound", row["target"])),
                    )
                    for row in figures.get("abstention", ())
                },
                {
                    target: ConformalIntervals(target, str(row["score"]), _margin(row["margin"]))
                    for target, row in rules.items()
                    if row["score"] == "quantile"
                },
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"these are not the figures of a calibration ({error!r})") from error

    def __call__(self, predictive: Predictive) -> Predictive:
        """Return the predictions with their confidence rescaled; those of a regression as they are."""
        if self.temperature is None or not isinstance(
            predictive, (ClassPredictive, BinaryPredictive)
        ):
            return predictive
        return self.temperature(predictive)

    @property
    def warning(self) -> str | None:
        """What the calibration made worse, in a sentence, or None."""
        scale = self.figures.get("temperature")
        if scale is None:
            return self._worse_intervals()
        if scale.get("used", True):
            return None
        before, after = scale["before"]["nll"], scale["after"]["nll"]
        return (
            f"the temperature {scale['value']:.3g} makes the NLL on the held-out part worse ({before:.4f} "
            f"before, {after:.4f} after), so that predictions keep their probabilities as they are"
        )

    def _worse_intervals(self) -> str | None:
        rows = {(row["score"], row["target"]): row["coverage"] for row in self.figures["intervals"]}
        for target in self.intervals:
            own, corrected = rows[None, target], rows["quantile", target]
            chance = 2 * math.sqrt(target * (1 - target) / self.figures["scored"])
            if abs(corrected - target) > abs(own - target) + chance:
                return (
                    f"the corrected intervals for {target:.0%} contain {corrected:.1%} of the held-out part, "
                    f"the posterior's own {own:.1%}: the two halves may differ; the corrected ones are used"
                )
        return None

    def __repr__(self) -> str:
        parts = []
        if self.temperature is not None:
            parts.append(f"temperature {self.temperature.temperature:.3g}")
        for words, rules in (
            ("sets for", self.sets),
            ("abstention for risks", self.abstention),
            ("intervals for", self.intervals),
        ):
            if rules:
                *front, last = (f"{target:g}" for target in rules)
                parts.append(f"{words} {', '.join(front)}{' and ' * bool(front)}{last}")
        return f"Calibration({', '.join(parts)})"


def calibrate(
    predictive: Predictive,
    targets: Tensor,
    scored: Predictive | None = None,
    scored_targets: Tensor | None = None,
    *,
    coverages: Sequence[float] = (0.8, 0.9, 0.95),
    risks: Sequence[float] = (0.01, 0.02, 0.05),
    ignore_index: int | None = None,
) -> Calibration:
    """Fit temperature, prediction sets and abstention, or the intervals of a regression.

    Args:
        predictive: Predictions on examples that nothing was fitted to.
        targets: Targets of these examples.
        scored: Predictions on other examples, to score the corrections. Without them, one half of the first,
            drawn with seed 0, is used for fitting and the other half for scoring.
        scored_targets: Targets of these.
        coverages: Target coverages of prediction sets and intervals.
        risks: Target risks of abstention.
        ignore_index: Label of what is not labelled, or None.
    """
    if scored is None or scored_targets is None:
        if len(predictive) < 2:
            raise ValueError(
                f"there are {len(predictive)} examples: one half is fitted to and the other scored, so give "
                "at least 2"
            )
        order = torch.randperm(len(predictive), generator=torch.Generator().manual_seed(0))
        one, other = order[: len(order) // 2], order[len(order) // 2 :]
        scored, scored_targets = predictive.subset(other), targets[other]
        predictive, targets = predictive.subset(one), targets[one]
    if isinstance(predictive, RegressionPredictive) and isinstance(scored, RegressionPredictive):
        figures = _interval_figures(predictive, targets, scored, scored_targets, coverages)
    else:
        figures = _class_figures(
            *_rows(predictive, targets, ignore_index),
            *_rows(scored, scored_targets, ignore_index),
            coverages,
            risks,
        )
    return Calibration.of(figures)


def _rows(
    predictive: Predictive, targets: Tensor, ignore_index: int | None
) -> tuple[ClassPredictive, Tensor]:
    classes = as_classes(predictive)  # type: ignore[arg-type]
    if isinstance(predictive, BinaryPredictive):
        targets = like_predictions(targets, predictive.probs.shape).long()
    return position_rows(classes, targets, ignore_index)


def _class_figures(
    fitted: ClassPredictive,
    fitted_labels: Tensor,
    scored: ClassPredictive,
    labels: Tensor,
    coverages: Sequence[float],
    risks: Sequence[float],
) -> dict[str, Any]:
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
                "threshold": _finite(rule.threshold),
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
                "threshold": _finite(answer.threshold),
                "coverage": float(answered.double().mean()),
                # NaN if none is answered
                "risk": _finite(1 - float(right[answered].double().mean())),
            }
        )
    before = probability_scores(scored.probs, labels)
    after = probability_scores(scaling(scored).probs, labels)
    return {
        "fitted": len(fitted),
        "scored": len(scored),
        "temperature": {
            "value": scaling.temperature,
            "before": before,
            "after": after,
            "used": after["nll"] <= before["nll"],
        },
        "conformal": conformal,
        "abstention": abstention,
    }


def _interval_figures(
    fitted: RegressionPredictive,
    fitted_targets: Tensor,
    scored: RegressionPredictive,
    targets: Tensor,
    coverages: Sequence[float],
) -> dict[str, Any]:
    wanted = like_predictions(targets, scored.mean.shape).double()
    rows: list[dict[str, Any]] = []
    for target in coverages:
        own = [scored.quantile(0.5 + side * target / 2).double() for side in (-1, 1)]
        found: list[tuple[str | None, Tensor, Tensor, dict[str, Any]]] = [
            (None, own[0], own[1], {})
        ]
        for score in ("residual", "quantile"):
            rule = conformal_intervals(fitted, fitted_targets, target, score)
            # One number for each output, or a nested list of them.
            found.append((score, *rule(scored), {"margin": _nested(rule.margin)}))
        rows += [
            {
                "score": score,
                "target": target,
                "coverage": float(((lower <= wanted) & (wanted <= upper)).double().mean()),
                "width": _finite(float((upper - lower).mean())),
                **more,
            }
            for score, lower, upper, more in found
        ]
    return {"fitted": len(fitted), "scored": len(scored), "intervals": rows}


def _finite(value: float) -> float | None:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _above_0(value: Any) -> float:
    if not float(value) > 0:
        raise ValueError(f"the temperature is {value}")
    return float(value)


def _nested(margin: Tensor) -> Any:
    if margin.dim():
        return [_nested(part) for part in margin]
    return _finite(float(margin))


def _margin(margin: Any) -> Tensor:
    def numbers(value: Any) -> Any:
        return [numbers(part) for part in value] if isinstance(value, list) else _number(value)

    return torch.tensor(numbers(margin), dtype=torch.float64)
