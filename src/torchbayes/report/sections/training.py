"""Training curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from torchbayes.report.charts import Line, line_chart, span
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Array, Axis, linear_ticks, log_ticks, percent_tick
from torchbayes.report.wording import percent, significant

__all__ = ["training_section"]


def training_section(results: Results) -> Section | None:
    """Plot loss and accuracy over epochs, as far as they were recorded."""
    charts = (
        _chart(results, "nll", "training NLL"),
        _chart(results, "validation_nll", "NLL on held-out data"),
        _chart(results, "validation_accuracy", "accuracy on held-out data"),
    )
    if not any(charts):
        return None
    methods = [method for method in results.methods if any(run.history for run in method.runs)]
    names = results.data, str(results.settings.get("data"))
    scaled = bool(results.valued) and any(n.startswith(("table:", "uci:")) for n in names)
    shown = list(filter(None, charts))
    body = render("training.html.j2", methods=methods, charts=shown, standardised=scaled)
    return Section("training", "Learning", "How they learned", body, folded=True)


def _chart(results: Results, key: str, label: str) -> Markup | None:
    show = percent if key == "validation_accuracy" else significant
    epochs = results.settings.get("epochs")
    lines = []
    for method in results.methods:
        courses = _courses(method, key, epochs if isinstance(epochs, int) else 0)
        if courses:
            shortest = min(map(len, courses))
            stack = np.stack([course[:shortest] for course in courses])
            mean = stack.mean(0)
            band = (stack.min(0), stack.max(0)) if len(courses) > 1 else None
            x = np.arange(1, shortest + 1, dtype=np.float64)
            hint = f"{method.name}: {show(float(mean[-1]))} at the end"
            lines.append(Line(method, x, mean, hint, band))
    axis = _accuracy_axis(lines, label) if show is percent else _loss_axis(lines, label)
    if axis is None:
        return None
    last = max(float(line.x[-1]) for line in lines)
    ticks = [tick for tick in linear_ticks(1, max(last, 2), 6) if tick == round(tick)]
    ends = ", ".join(f"{line.method.name} {show(float(line.y[-1]))}" for line in lines)
    name = f"{label} over {int(last)} epochs; at the end: {ends}."
    return line_chart(lines, Axis(1, max(last, 2), "epoch", ticks), axis, name)


def _loss_axis(lines: Sequence[Line], label: str) -> Axis | None:
    if not lines:
        return None
    low, high = span(lines)
    if low <= 0 or min(float(line.y.min()) for line in lines) <= 0:  # a density may exceed 1
        room = 0.06 * max(high - low, 1e-4)
        return Axis(low - room, high + room, label, linear_ticks(low - room, high + room))
    # Losses fall by orders of magnitude: on a linear axis the part that matters would be flat.
    low, high = 0.9 * min(float(line.y.min()) for line in lines), high * 1.1
    return Axis(low, high, f"{label}, log scale", log_ticks(low, high), transform=_log)


def _accuracy_axis(lines: Sequence[Line], label: str) -> Axis | None:
    if not lines:
        return None
    low = min(float(np.floor(span(lines)[0] * 20) / 20), 0.95)
    return Axis(low, 1.0, label, linear_ticks(low, 1.0), percent_tick)


def _log(values: Array) -> Array:
    return np.log10(np.maximum(values, 1e-12))


def _courses(method: MethodResult, key: str, epochs: int) -> list[Array]:
    """Return the values of `key` by epoch for every run and every member of an ensemble.

    An ensemble trains its members one after another, so its history is that many times as long.
    """
    courses: list[Array] = []
    for run in method.runs:
        values = np.asarray([row[key] for row in run.history if key in row], dtype=np.float64)
        members = len(values) // epochs if epochs > 0 and len(values) % epochs == 0 else 1
        courses += np.split(values, max(members, 1))
    return [course for course in courses if len(course) > 1]
