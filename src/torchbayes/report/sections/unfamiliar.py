"""Out-of-distribution detection: histograms of two kinds of doubt, and ROC curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from torch import Tensor

from torchbayes import metrics
from torchbayes.predict.results import ClassPredictive
from torchbayes.report.charts import Line, line_chart
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Array, Axis, Panel, colour, linear_ticks
from torchbayes.report.wording import fixed, percent

__all__ = ["unfamiliar_section"]

_BINS = 24
_NOTHING = 1e-6


@dataclass(frozen=True)
class Doubt:
    """A measure of doubt.

    Attributes:
        name: What it is called.
        key: The score in results.json that it is judged by.
        of: Computes it, in nats.
    """

    name: str
    key: str
    of: Callable[[ClassPredictive], Tensor]


_ENTROPY = Doubt("entropy", "auroc_ood", lambda predictive: predictive.entropy)
_INFORMATION = Doubt(
    "mutual information",
    "auroc_ood_mutual_information",
    lambda predictive: predictive.epistemic,
)

Pair = tuple[MethodResult, Tensor, Tensor]
"""A method with its doubt about test inputs and about unfamiliar ones."""


def unfamiliar_section(results: Results) -> Section | None:
    """Histograms and ROC curves for each measure of doubt."""
    parts = []
    for doubt in (_ENTROPY, _INFORMATION):
        pairs = _pairs(results, doubt)
        if pairs:
            classes = max(predictions.probs.shape[1] for _, predictions in results.predicted)
            parts.append(
                {
                    "doubt": doubt,
                    "histograms": _histograms(pairs, doubt, classes),
                    "roc": _roc(pairs, doubt),
                    "ranked": sorted(
                        results.scored(doubt.key), key=lambda scored: scored.value, reverse=True
                    ),
                    "methods": [method for method, _, _ in pairs],
                }
            )
    if not parts:
        return None
    body = render("unfamiliar.html.j2", results=results, parts=parts)
    return Section("unfamiliar", "Unfamiliar", "Does it notice unfamiliar inputs?", body)


def _pairs(results: Results, doubt: Doubt) -> list[Pair]:
    """The methods that have this doubt at all: a point estimate has no mutual information."""
    pairs = []
    for method, predictions in results.predicted:
        if predictions.ood is None or len(predictions.ood) == 0:
            continue
        known, foreign = doubt.of(predictions.test), doubt.of(predictions.ood)
        if max(float(known.max()), float(foreign.max())) > _NOTHING:
            pairs.append((method, known.double(), foreign.double()))
    return pairs


def _histograms(
    pairs: Sequence[Pair], doubt: Doubt, classes: int
) -> list[tuple[MethodResult, Markup]]:
    most = max(max(float(known.max()), float(foreign.max())) for _, known, foreign in pairs)
    high = math.log(classes) if doubt is _ENTROPY else most
    edges = np.linspace(0.0, max(high, most), _BINS + 1)
    shares = [
        (
            method,
            np.histogram(known.numpy(), edges)[0] / len(known),
            np.histogram(foreign.numpy(), edges)[0] / len(foreign),
        )
        for method, known, foreign in pairs
    ]
    tallest = max(float(max(known.max(), foreign.max())) for _, known, foreign in shares)
    result = []
    for (method, known, foreign), (_, known_doubt, foreign_doubt) in zip(
        shares, pairs, strict=True
    ):
        panel = _mirror_panel(doubt, float(edges[-1]), tallest)
        for low, high, test, other in zip(edges, edges[1:], known, foreign, strict=False):
            where = f"{doubt.name} {low:.2f} to {high:.2f}: "
            if test > 0:
                hint = f"{where}{percent(test)} of test inputs"
                panel.bar(low, high, 0, test, "bar plain", hint)
            if other > 0:
                hint = f"{where}{percent(other)} of unfamiliar inputs"
                panel.bar(low, high, 0, -other, f"bar {colour(method.index)}", hint)
        panel.line(np.asarray([0, edges[-1]]), np.zeros(2), "axis")
        panel.write("test", panel.width - panel.right, panel.top + 8, "end", "name")
        floor = panel.height - panel.bottom - 6
        panel.write("unfamiliar", panel.width - panel.right, floor, "end", "name")
        medians = (float(known_doubt.median()), float(foreign_doubt.median()))
        name = (
            f"Histograms of {method.name}'s {doubt.name}: the median is {fixed(medians[0], 3)} nats "
            f"for test inputs and {fixed(medians[1], 3)} for unfamiliar inputs."
        )
        result.append((method, panel.draw(name)))
    return result


def _signed_root(values: Array) -> Array:
    return np.asarray(np.sign(values) * np.sqrt(np.abs(values)))


def _mirror_panel(doubt: Doubt, high: float, tallest: float) -> Panel:
    """Test inputs upwards, unfamiliar ones downwards, on a root scale that shows small shares."""
    marks = [mark for mark in (0.05, 0.25, 0.5, 1.0) if mark <= tallest * 1.05]
    ticks = [-mark for mark in reversed(marks)] + marks
    y = Axis(
        -tallest * 1.08,
        tallest * 1.08,
        "share of inputs, root scale",
        ticks,
        lambda value: f"{100 * abs(value):g} %",
        _signed_root,
    )
    x = Axis(0, high, f"{doubt.name}, nats", linear_ticks(0, high, 5))
    return Panel(x, y, 300, 236, left=44)


def _roc(pairs: Sequence[Pair], doubt: Doubt) -> Markup:
    lines, areas = [], []
    for method, known, foreign in pairs:
        curve = metrics.roc_curve(known, foreign)
        area = fixed(metrics.auroc(known, foreign), 3)
        areas.append(f"{method.name} {area}")
        lines.append(
            Line(method, curve.fpr.numpy(), curve.tpr.numpy(), f"{method.name}: AUROC {area}")
        )
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    return line_chart(
        lines,
        Axis(0, 1, "false alarms, share of test inputs", ticks, lambda v: f"{100 * v:g} %"),
        Axis(0, 1, "unfamiliar inputs caught", ticks, lambda v: f"{100 * v:g} %"),
        f"ROC curves of unfamiliar inputs by {doubt.name}; areas: {', '.join(areas)}.",
        width=500,
        diagonal=True,
    )
