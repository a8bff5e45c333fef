"""Charts with one line a method, as several sections draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from torchbayes.report.results import MethodResult
from torchbayes.report.svg import Array, Axis, Panel, colour, element, marker, markup

__all__ = ["Line", "line_chart", "swatch"]


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
