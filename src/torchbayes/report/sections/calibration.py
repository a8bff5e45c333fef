"""Reliability diagrams: how sure a method is against how often it is right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from torchbayes import metrics
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.metrics.calibration import mean_gap
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Array, Axis, Panel, colour, linear_ticks, marker, percent_tick
from torchbayes.report.wording import fixed, percent, seed_note, whole, wilson

__all__ = ["calibration_section"]

_WIDTH, _LEFT = 240, 38
_TENTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def calibration_section(results: Results) -> Section | None:
    """Draw one diagram per method with bins of equal width and one with bins of equal mass."""
    if not results.predicted:
        return None
    wide = [
        (m, p, metrics.reliability_curve(p.probs, p.targets, bins=15)) for m, p in results.predicted
    ]
    equal = [
        (m, metrics.reliability_curve(p.probs, p.targets, bins=8, equal_mass=True))
        for m, p in results.predicted
    ]
    # One range as tight as the lowest point allows, because the bins crowd near 1.
    lowest = {m: float(np.nanmin(np.r_[c.confidence, c.accuracy])) for m, c in equal}
    shown = [value for method, value in lowest.items() if method.first]
    low = _start(min(shown or lowest.values()))
    body = render(
        "calibration.html.j2",
        equal_width=[(m, _equal_width(m, p, curve), _histogram(m, curve)) for m, p, curve in wide],
        equal_mass=[
            (m, _equal_mass(m, curve, min(low, _start(lowest[m]))), mean_gap(curve))
            for m, curve in equal
        ],
        ranked=sorted(results.scored("ece"), key=lambda scored: scored.value),
        seed_notes={method.name: seed_note(method) for method, _ in results.predicted},
    )
    return Section("calibration", "Confidence", "Can you trust the confidence?", body)


def _start(lowest: float) -> float:
    return max(0.0, math.floor(lowest * 20 - 0.5) / 20)


def _unit_panel(low: float = 0.0) -> Panel:
    ticks = _TENTHS if low == 0 else linear_ticks(low, 1.0, 4)
    x, y = (Axis(low, 1.0, label, ticks) for label in ("confidence", "accuracy"))
    return Panel(x, y, _WIDTH, 230, _LEFT)


def _bins(curve: metrics.ReliabilityCurve) -> Iterator[tuple[int, float, float, str]]:
    """Yield the index, edges and description of every bin that is not empty."""
    edges = curve.edges.tolist()
    for index, (low, high) in enumerate(pairwise(edges)):
        if curve.count[index] > 0:
            yield index, low, high, f"{percent(low, 0)} to {percent(high, 0)} sure: "


def _equal_width(
    method: MethodResult, predictions: Predictions, curve: metrics.ReliabilityCurve
) -> Markup:
    """Draw the accuracy in 15 bins as bars, each with a line at its confidence."""
    panel = _unit_panel()
    for bin_, low, high, where in _bins(curve):
        count = int(curve.count[bin_])
        sure, right = float(curve.confidence[bin_]), float(curve.accuracy[bin_])
        hint = f"{where}{whole(count)} examples, {percent(sure)} sure, {percent(right)} right"
        # Bins of few examples say little, so they are paler.
        faint = " faint" if count < 10 else ""
        panel.bar(low, high, 0, right, f"bar {colour(method.index)}{faint}", hint)
        panel.line(np.asarray([low, high]), np.asarray([sure, sure]), f"sure{faint}")
    ends: Array = np.asarray([0.0, 1.0])
    panel.line(ends, ends, "guide")
    sure = float(predictions.test.confidence.double().mean())
    right = metrics.accuracy(predictions.probs, predictions.targets)
    return panel.draw(
        f"Reliability diagram of {method.name} with 15 bins of equal width: on average "
        f"{percent(sure)} sure and {percent(right)} right, ECE {fixed(mean_gap(curve), 4)}."
    )


def _histogram(method: MethodResult, curve: metrics.ReliabilityCurve) -> Markup:
    """Draw the share of examples in each of the 15 bins."""
    shares = (curve.count.double() / curve.count.sum()).tolist()
    y = Axis(0, 1, "share of examples", (0.0, 0.5, 1.0), percent_tick)
    panel = Panel(Axis(0, 1, "", _TENTHS), y, _WIDTH, 96, _LEFT, top=24, bottom=22)
    for bin_, low, high, where in _bins(curve):
        hint = f"{where}{percent(shares[bin_])} of examples"
        panel.bar(low, high, 0, shares[bin_], "bar plain", hint)
    return panel.draw(
        f"Histogram of {method.name}'s confidence: {percent(shares[-1])} of examples are in the "
        f"highest of 15 bins, above {percent(float(curve.edges[-2]))}."
    )


def _equal_mass(method: MethodResult, curve: metrics.ReliabilityCurve, low: float) -> Markup:
    """Plot accuracy against confidence in 8 bins of equal mass, with 95 % intervals."""
    panel = _unit_panel(low)
    ends: Array = np.asarray([low, 1.0])
    panel.line(ends, ends, "guide")
    style = colour(method.index)
    full = curve.count > 0
    sure, right = curve.confidence[full].numpy(), curve.accuracy[full].numpy()
    panel.line(sure, right, f"line {style}")
    for x, y, count in zip(sure.tolist(), right.tolist(), curve.count[full].tolist(), strict=True):
        ends = np.maximum(np.asarray(wilson(y, count)), low)
        panel.line(np.asarray([x, x]), ends, f"whisker {style}")
        panel.nodes.append(marker(method.index, panel.at_x(x), panel.at_y(y)))
    worst = int(np.abs(sure - right).argmax())
    return panel.draw(
        f"Reliability diagram of {method.name} with 8 bins of equal mass: in the bin that is "
        f"furthest off it is {percent(float(sure[worst]))} sure and "
        f"{percent(float(right[worst]))} right."
    )
