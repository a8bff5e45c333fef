"""Reliability diagrams: how sure a method is against how often it is right."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from torchbayes import metrics
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.metrics.calibration import mean_gap
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Array, Axis, Panel, colour, linear_ticks, marker
from torchbayes.report.wording import fixed, percent, seed_note, whole, wilson

__all__ = ["calibration_section"]

_WIDTH, _HEIGHT, _HISTOGRAM = 300.0, 280.0, 96.0
_TENTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def calibration_section(results: Results) -> Section | None:
    """A row of diagrams with bins of equal width, and one with bins of equal mass."""
    if not results.predicted:
        return None
    wide = [
        (method, p, metrics.reliability_curve(p.probs, p.targets, bins=15))
        for method, p in results.predicted
    ]
    equal = [
        (method, metrics.reliability_curve(p.probs, p.targets, bins=8, equal_mass=True))
        for method, p in results.predicted
    ]
    low = min(
        float(np.nanmin(np.concatenate([curve.confidence.numpy(), curve.accuracy.numpy()])))
        for _, curve in equal
    )
    # One range for all methods, as close as the lowest point allows: the bins crowd near 1.
    low = max(0.0, math.floor(low * 20 - 0.5) / 20)
    body = render(
        "calibration.html.j2",
        equal_width=[(m, _equal_width(m, p, curve), _histogram(m, curve)) for m, p, curve in wide],
        equal_mass=[(m, _equal_mass(m, curve, low), mean_gap(curve)) for m, curve in equal],
        ranked=sorted(results.scored("ece"), key=lambda scored: scored.value),
        seed_notes={method.name: seed_note(method) for method, _ in results.predicted},
    )
    return Section("calibration", "Confidence", "Can you trust the confidence?", body)


def _tenth(value: float) -> str:
    return f"{value:g}"


def _unit(label: str, low: float = 0.0) -> Axis:
    ticks = _TENTHS if low == 0 else linear_ticks(low, 1.0, 4)
    return Axis(low, 1.0, label, ticks, _tenth)


def _equal_width(
    method: MethodResult, predictions: Predictions, curve: metrics.ReliabilityCurve
) -> Markup:
    """Accuracy in 15 bins as bars, each with a tick at its confidence."""
    panel = Panel(_unit("confidence"), _unit("accuracy"), _WIDTH, _HEIGHT, left=40)
    edges = curve.edges.tolist()
    style = colour(method.index)
    for bin_, count in enumerate(curve.count.tolist()):
        if count == 0:
            continue
        sure, right = float(curve.confidence[bin_]), float(curve.accuracy[bin_])
        hint = (
            f"{percent(edges[bin_], 0)} to {percent(edges[bin_ + 1], 0)} sure: "
            f"{whole(count)} examples, {percent(sure)} sure, {percent(right)} right"
        )
        # Bins of a few examples say little: they are drawn paler.
        faint = " faint" if count < 10 else ""
        panel.bar(edges[bin_], edges[bin_ + 1], 0, right, f"bar {style}{faint}", hint)
        panel.line(np.asarray(edges[bin_ : bin_ + 2]), np.asarray([sure, sure]), f"sure{faint}")
    ends: Array = np.asarray([0.0, 1.0])
    panel.line(ends, ends, "guide")
    sure = float(predictions.test.confidence.double().mean())
    right = metrics.accuracy(predictions.probs, predictions.targets)
    return panel.draw(
        f"Reliability diagram of {method.name} with 15 bins of equal width: on average "
        f"{percent(sure)} sure and {percent(right)} right, ECE {fixed(mean_gap(curve), 4)}."
    )


def _histogram(method: MethodResult, curve: metrics.ReliabilityCurve) -> Markup:
    """How many examples each of the 15 bins holds."""
    total = int(curve.count.sum())
    shares = [count / total for count in curve.count.tolist()]
    y = Axis(0, 1, "share of examples", (0.0, 0.5, 1.0), lambda value: f"{100 * value:g} %")
    panel = Panel(
        Axis(0, 1, "", _TENTHS, _tenth), y, _WIDTH, _HISTOGRAM, left=40, bottom=22, top=24
    )
    edges = curve.edges.tolist()
    for bin_, share in enumerate(shares):
        if share > 0:
            hint = (
                f"{percent(edges[bin_], 0)} to {percent(edges[bin_ + 1], 0)} sure: "
                f"{percent(share)} of examples"
            )
            panel.bar(edges[bin_], edges[bin_ + 1], 0, share, "bar plain", hint)
    return panel.draw(
        f"Histogram of {method.name}'s confidence: {percent(shares[-1])} of examples are in the "
        f"highest of 15 bins, above {percent(edges[-2])}."
    )


def _equal_mass(method: MethodResult, curve: metrics.ReliabilityCurve, low: float) -> Markup:
    """Accuracy against confidence in 8 bins of equally many examples, with 95 % intervals."""
    panel = Panel(_unit("confidence", low), _unit("accuracy", low), _WIDTH, _HEIGHT, left=40)
    ends: Array = np.asarray([low, 1.0])
    panel.line(ends, ends, "guide")
    style = colour(method.index)
    full = curve.count.numpy() > 0
    sure, right = curve.confidence.numpy()[full], curve.accuracy.numpy()[full]
    counts = curve.count.numpy()[full]
    panel.line(sure, right, f"line {style}")
    for x, y, count in zip(sure.tolist(), right.tolist(), counts.tolist(), strict=True):
        ends = np.maximum(np.asarray(wilson(y, count)), low)
        panel.line(np.asarray([x, x]), ends, f"whisker {style}")
        node = marker(method.index, panel.at_x(x), panel.at_y(y))
        node.set("class", f"marker {style}")
        panel.nodes.append(node)
    worst = int(np.abs(sure - right).argmax())
    return panel.draw(
        f"Reliability diagram of {method.name} with 8 bins of equal mass: in the bin that is "
        f"furthest off it is {percent(float(sure[worst]))} sure and "
        f"{percent(float(right[worst]))} right."
    )
