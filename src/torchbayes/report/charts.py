"""Charts with one line per method, shared by several sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from torchbayes.report.results import MethodResult, Row
from torchbayes.report.svg import Array, Axis, Panel, colour, linear_ticks, marker, percent_tick

__all__ = ["Course", "Line", "line_chart", "mean_course", "score_axis", "span"]

Course = Mapping[str, Array]
"""Scores of one method along an axis, such as the number of draws."""


@dataclass(frozen=True, eq=False)
class Line:
    """One method's line.

    Attributes:
        method: The method.
        x: Positions.
        y: Values.
        hint: Text shown when the pointer rests on the line.
        band: Lowest and highest value at each position, or None.
    """

    method: MethodResult
    x: Array
    y: Array
    hint: str
    band: tuple[Array, Array] | None = None


def mean_course(runs: Sequence[Sequence[Row]], keys: Sequence[str]) -> Course | None:
    """Average the rows of several runs, up to the end of the shortest.

    Args:
        runs: The rows of each run; runs with fewer than two rows or with missing keys are skipped.
        keys: Keys to average.

    Returns:
        The averages by key, or None if no run is usable.
    """
    usable = [
        rows for rows in runs if len(rows) > 1 and all(set(keys) <= row.keys() for row in rows)
    ]
    if not usable:
        return None
    end = min(map(len, usable))
    return {k: np.mean([[row[k] for row in rows[:end]] for rows in usable], axis=0) for k in keys}


def line_chart(
    lines: Sequence[Line], x: Axis, y: Axis, name: str, *, width: float = 420, diagonal: bool = False,
) -> Markup:  # fmt: skip
    """Draw one line per method.

    Args:
        lines: The lines.
        x: Horizontal axis.
        y: Vertical axis.
        name: Text alternative for screen readers.
        width: Width of the picture.
        diagonal: Whether to draw the diagonal as a guide.
    """
    panel = Panel(x, y, width)
    if diagonal:
        ends = np.asarray([0.0, 1.0])
        panel.line(ends, ends, "guide")
    start = len(panel.nodes)
    for line in lines:
        if line.band is not None:
            index = line.method.index
            panel.area(line.x, *line.band, class_=f"band {colour(index)}", data_m=str(index))
    for number, line in enumerate(lines):
        index = line.method.index
        tags = {"data_m": str(index), "data_name": line.method.name}
        panel.line(line.x, line.y, f"line {colour(index)}", line.hint, **tags)
        # One marker per line, each at a different position, so that close lines do not hide them.
        along = (number + 1) / (len(lines) + 1)
        place = panel.points(line.x, line.y)
        at = int(np.abs(place[:, 0] - (place[0, 0] + along * np.ptp(place[:, 0]))).argmin())
        panel.nodes.append(marker(index, *place[at], data_m=str(index)))
    panel.nodes, inside = panel.nodes[:start], panel.nodes[start:]
    panel.frame(inside)
    return panel.draw(name, read_off=True)


def span(lines: Sequence[Line]) -> tuple[float, float]:
    """Return the range of values that an axis should cover.

    It covers the methods that the page shows at first. Others widen it by half at most at either end: a
    method far off leaves the frame instead of squashing all others.
    """
    values = [np.concatenate(line.band or [line.y]) for line in lines]
    shown = [v for v, line in zip(values, lines, strict=True) if line.method.first] or values
    low, high = min(float(v.min()) for v in shown), max(float(v.max()) for v in shown)
    room = 0.5 * (high - low)
    return (
        max(low - room, min(float(v.min()) for v in values)),
        min(high + room, max(float(v.max()) for v in values)),
    )


def score_axis(lines: Sequence[Line], label: str, *, share: bool, from_zero: bool = False) -> Axis:
    """Return a vertical axis slightly wider than the range of the lines.

    Args:
        lines: Lines to fit.
        label: Its label.
        share: Whether the score is a share of examples, which cannot exceed 100 %.
        from_zero: Whether to start at 0.
    """
    low, high = span(lines)
    room = max(high - low, 1e-4) * 0.06
    low = 0.0 if from_zero else low - room
    high = min(high + room, 1.0 if share else np.inf)
    show = percent_tick if share else "{:.3g}".format
    return Axis(low, high, label, linear_ticks(low, high), show)
