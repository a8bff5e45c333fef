"""Training curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup

from torchbayes.report.charts import Line, line_chart
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results, Row
from torchbayes.report.svg import Array, Axis, linear_ticks, log_ticks
from torchbayes.report.wording import percent, significant

__all__ = ["training_section"]


def training_section(results: Results) -> Section | None:
    """Loss and accuracy over epochs, as far as they were noted."""
    charts = [
        chart
        for chart in (
            _loss_chart(results, "nll", "training NLL"),
            _loss_chart(results, "validation_nll", "NLL on held-out data"),
            _accuracy_chart(results),
        )
        if chart is not None
    ]
    if not charts:
        return None
    methods = [method for method in results.methods if any(run.history for run in method.runs)]
    body = render("training.html.j2", methods=methods, charts=charts)
    return Section("training", "Learning", "How they learned", body)


def _loss_chart(results: Results, key: str, label: str) -> Markup | None:
    lines = _lines(results, key, significant)
    values = np.concatenate([_extent(line) for line in lines]) if lines else np.empty(0)
    values = values[values > 0]
    if len(values) == 0:
        return None
    # Losses fall by orders of magnitude: on a linear axis the part that matters would be flat.
    low, high = float(values.min()) * 0.9, float(values.max()) * 1.1
    y = Axis(low, high, f"{label}, log scale", log_ticks(low, high), "{:g}".format, _log)
    return line_chart(lines, _epochs(lines), y, _name(label, lines, significant))


def _accuracy_chart(results: Results) -> Markup | None:
    lines = _lines(results, "validation_accuracy", percent)
    if not lines:
        return None
    low = float(np.concatenate([_extent(line) for line in lines]).min())
    low = min(np.floor(low * 20) / 20, 0.95)
    label = "accuracy on held-out data"
    y = Axis(low, 1.0, label, linear_ticks(low, 1.0), lambda value: f"{100 * value:g} %")
    return line_chart(lines, _epochs(lines), y, _name(label, lines, percent))


def _log(values: Array) -> Array:
    return np.log10(np.maximum(values, 1e-12))


def _extent(line: Line) -> Array:
    return line.y if line.band is None else np.concatenate(line.band)


def _epochs(lines: Sequence[Line]) -> Axis:
    last = max(float(line.x[-1]) for line in lines)
    ticks = [tick for tick in linear_ticks(1, max(last, 2), 6) if tick == round(tick)]
    return Axis(1, max(last, 2), "epoch", ticks)


def _name(label: str, lines: Sequence[Line], show: Callable[[float], str]) -> str:
    ends = ", ".join(f"{line.method.name} {show(float(line.y[-1]))}" for line in lines)
    return f"{label} over {int(max(line.x[-1] for line in lines))} epochs; at the end: {ends}."


def _lines(results: Results, key: str, show: Callable[[float], str]) -> list[Line]:
    epochs = results.settings.get("epochs")
    lines = []
    for method in results.methods:
        courses = _courses(method, key, epochs if isinstance(epochs, int) else None)
        if courses:
            shortest = min(len(course) for course in courses)
            stack = np.stack([course[:shortest] for course in courses])
            mean = stack.mean(0)
            hint = f"{method.name}: {show(float(mean[-1]))} at the end"
            band = (stack.min(0), stack.max(0)) if len(courses) > 1 else None
            x = np.arange(1, shortest + 1, dtype=np.float64)
            lines.append(Line(method, x, mean, hint, band))
    return lines


def _courses(method: MethodResult, key: str, epochs: int | None) -> list[Array]:
    """The course of a number in every run, and in every member of an ensemble.

    An ensemble trains its members one after another, so its history is that many times as long.
    """
    courses: list[Array] = []
    for run in method.runs:
        rows: Sequence[Row] = [row for row in run.history if key in row]
        size = len(rows) if epochs is None or epochs < 1 or len(rows) % epochs else epochs
        for start in range(0, len(rows), size if size else 1):
            part = rows[start : start + size]
            courses.append(np.asarray([row[key] for row in part], dtype=np.float64))
    return [course for course in courses if len(course) > 1]
