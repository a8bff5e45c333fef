"""Charts with one line a method, as several sections draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from torchbayes.report.results import MethodResult
from torchbayes.report.svg import Array, Axis, Panel, colour, element, linear_ticks, marker, markup

__all__ = ["Line", "line_chart", "score_axis", "swatch"]


@dataclass(frozen=True, eq=False)
class Line:
    """One method's line.

    Attributes:
        method: Whose it is.
        x: Positions.
        y: Values.
        hint: What to show when a pointer rests on it.
        band: The lowest and highest value at each position, or None.
    """

    method: MethodResult
    x: Array
    y: Array
    hint: str
    band: tuple[Array, Array] | None = None


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    name: str,
    *,
    width: float = 420,
    diagonal: bool = False,
) -> Markup:
    """Draw one line a method.

    Args:
        lines: The lines.
        x: The horizontal axis.
        y: The vertical axis.
        name: What the chart shows, for those who cannot see it.
        width: Of the picture.
        diagonal: Draw the line from corner to corner as a guide.
    """
    panel = Panel(x, y, width)
    if diagonal:
        ends = np.asarray([0.0, 1.0])
        panel.line(ends, ends, "guide")
    for line in lines:
        if line.band is not None:
            panel.area(
                line.x,
                *line.band,
                class_=f"band {colour(line.method.index)}",
                data_m=str(line.method.index),
            )
    for number, line in enumerate(lines):
        style = colour(line.method.index)
        panel.line(
            line.x,
            line.y,
            f"line {style}",
            line.hint,
            data_m=str(line.method.index),
            data_name=line.method.name,
        )
        # One shape on each line, at places of their own so that close lines do not hide them.
        along = (number + 1) / (len(lines) + 1)
        place = panel.points(line.x, line.y)
        at = int(np.abs(place[:, 0] - (place[0, 0] + along * np.ptp(place[:, 0]))).argmin())
        node = marker(line.method.index, *place[at])
        node.set("class", f"marker {style}")
        node.set("data-m", str(line.method.index))
        panel.nodes.append(node)
    return panel.draw(name, read_off=True)


def score_axis(lines: Sequence[Line], label: str, *, share: bool, from_zero: bool = False) -> Axis:
    """The vertical axis of a score, a little wider than the lines.

    Args:
        lines: What it has to hold.
        label: Its name.
        share: Whether the score is a share of examples, which ends at 100 %.
        from_zero: Whether to begin at 0.
    """
    values = np.concatenate([line.y for line in lines])
    room = max(float(np.ptp(values)), 1e-4) * 0.06
    low = 0.0 if from_zero else float(values.min()) - room
    high = min(float(values.max()) + room, 1.0 if share else np.inf)
    tick = (lambda v: f"{100 * v:.4g} %") if share else "{:.3g}".format
    return Axis(low, high, label, linear_ticks(low, high), tick)


def swatch(method: MethodResult) -> Markup:
    """A bit of a method's line, for legends."""
    style = colour(method.index)
    shape = marker(method.index, 15, 7)
    shape.set("class", f"marker {style}")
    return markup(
        element(
            "svg",
            element("path", d="M1,7H29", class_=f"line {style}"),
            shape,
            viewBox="0 0 30 14",
            class_="swatch",
            aria_hidden="true",
        )
    )
