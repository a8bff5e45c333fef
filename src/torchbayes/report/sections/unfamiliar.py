"""Out-of-distribution detection: histograms of two kinds of uncertainty, and ROC curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from torch import Tensor

from torchbayes import metrics
from torchbayes.predict.results import ClassPredictive
from torchbayes.report.charts import Line, line_chart
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Array, Axis, Panel, colour, linear_ticks, percent_tick
from torchbayes.report.wording import fixed, percent

__all__ = ["unfamiliar_section"]

_BINS = 24
_NOTHING = 1e-6


class Measure(NamedTuple):
    """A measure of uncertainty.

    Attributes:
        name: Its name.
        key: Score in results.json that judges it.
        of: Computes it, in nats.
    """

    name: str
    key: str
    of: Callable[[ClassPredictive], Tensor]


_ENTROPY = Measure("entropy", "auroc_ood", lambda predictive: predictive.entropy)
_INFORMATION = Measure(
    "mutual information", "auroc_ood_mutual_information", lambda predictive: predictive.epistemic
)

Pair = tuple[MethodResult, Tensor, Tensor]
"""A method with its uncertainty about test inputs and about unfamiliar ones."""


def unfamiliar_section(results: Results) -> Section | None:
    """Draw histograms and ROC curves for each measure of uncertainty."""
    parts = []
    for measure in (_ENTROPY, _INFORMATION):
        pairs = _pairs(results, measure)
        if pairs:
            classes = max(predictions.probs.shape[1] for _, predictions in results.predicted)
            ranked = sorted(results.scored(measure.key), key=lambda s: s.value, reverse=True)
            parts.append(
                {
                    "measure": measure,
                    "histograms": _histograms(pairs, measure, classes),
                    "roc": _roc(pairs, measure),
                    "ranked": ranked,
                    "methods": [method for method, _, _ in pairs],
                }
            )
    if not parts:
        return None
    body = render("unfamiliar.html.j2", results=results, parts=parts)
    return Section("unfamiliar", "Unfamiliar", "Does it notice unfamiliar inputs?", body)


def _pairs(results: Results, measure: Measure) -> list[Pair]:
    """Return the methods that have this uncertainty: a point estimate has no mutual information."""
    pairs = []
    for method, predictions in results.predicted:
        if predictions.ood is None or len(predictions.ood) == 0:
            continue
        known, foreign = measure.of(predictions.test), measure.of(predictions.ood)
        if max(float(known.max()), float(foreign.max())) > _NOTHING:
            pairs.append((method, known.double(), foreign.double()))
    return pairs


def _histograms(
    pairs: Sequence[Pair], measure: Measure, classes: int
) -> list[tuple[MethodResult, Markup]]:
    most = max(max(float(known.max()), float(foreign.max())) for _, known, foreign in pairs)
    edges = np.linspace(
        0.0, max(math.log(classes), most) if measure is _ENTROPY else most, _BINS + 1
    )
    shares = [[np.histogram(d, edges)[0] / len(d) for d in pair[1:]] for pair in pairs]
    tallest = float(np.max(shares))
    result = []
    for (method, *values), (known, foreign) in zip(pairs, shares, strict=True):
        panel = _mirror_panel(measure, float(edges[-1]), tallest)
        for low, high, test, other in zip(edges, edges[1:], known, foreign, strict=False):
            where = f"{measure.name} {low:.2f} to {high:.2f}: "
            if test > 0:
                panel.bar(low, high, 0, test, "bar plain", f"{where}{percent(test)} of test inputs")
            if other > 0:
                hint = f"{where}{percent(other)} of unfamiliar inputs"
                panel.bar(low, high, 0, -other, f"bar {colour(method.index)}", hint)
        panel.line(np.asarray([0, edges[-1]]), np.zeros(2), "axis")
        right, floor = panel.width - panel.right, panel.height - panel.bottom - 6
        panel.write("test", right, panel.top + 8, "end", "name")
        panel.write("unfamiliar", right, floor, "end", "name")
        medians = [fixed(float(d.median()), 3) for d in values]
        name = (
            f"Histograms of {method.name}'s {measure.name}: the median is {medians[0]} nats "
            f"for test inputs and {medians[1]} for unfamiliar inputs."
        )
        result.append((method, panel.draw(name)))
    return result


def _signed_root(values: Array) -> Array:
    return np.asarray(np.sign(values) * np.sqrt(np.abs(values)))


def _mirror_panel(measure: Measure, high: float, tallest: float) -> Panel:
    """Test inputs point up, unfamiliar ones down, on a root scale that shows small shares."""
    marks = [mark for mark in (0.05, 0.25, 0.5, 1.0) if mark <= tallest * 1.05]
    ticks, end = [-mark for mark in reversed(marks)] + marks, tallest * 1.08
    label = "share of inputs, root scale"
    y = Axis(-end, end, label, ticks, lambda value: percent_tick(abs(value)), _signed_root)
    x = Axis(0, high, f"{measure.name}, nats", linear_ticks(0, high, 4))
    return Panel(x, y, 240, 210, left=44)


def _roc(pairs: Sequence[Pair], measure: Measure) -> Markup:
    lines, areas = [], []
    for method, known, foreign in pairs:
        curve = metrics.roc_curve(known, foreign)
        area = fixed(metrics.auroc(known, foreign), 3)
        areas.append(f"{method.name} {area}")
        hint = f"{method.name}: AUROC {area}"
        lines.append(Line(method, curve.fpr.numpy(), curve.tpr.numpy(), hint))
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    return line_chart(
        lines,
        Axis(0, 1, "false alarms, share of test inputs", ticks, percent_tick),
        Axis(0, 1, "unfamiliar inputs caught", ticks, percent_tick),
        f"ROC curves of unfamiliar inputs by {measure.name}; areas: {', '.join(areas)}.",
        width=600,
        diagonal=True,
    )
