"""A chart of quality against cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from torchbayes.report.labels import Box, Label, place_labels
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Axis, Panel, linear_ticks, log_ticks, marker
from torchbayes.report.wording import duration, significant

__all__ = ["cost_chart", "fence"]

_WIDTH, _TOP, _RIGHT = 600.0, 34.0, 24.0
_LONGEST = 18


class Point(NamedTuple):
    """A method in the chart: its training time, its NLL, and whether that is beyond the axis."""

    time: float
    loss: float
    method: MethodResult
    beyond: bool

    @property
    def text(self) -> str:
        """Its name and, at the edge, its value."""
        name = self.method.name
        short = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
        return f"{short} {significant(self.loss)} ↑" if self.beyond else short


def cost_chart(results: Results) -> Markup | None:
    """Plot NLL against training time: further left is cheaper, lower is better.

    Values far above the others stand at the upper edge, with an arrow and the value.
    """
    times = {m.name: t for t, m in results.scored("seconds") if t > 0}
    scored = [(times[m.name], v, m) for v, m in results.scored("nll") if m.name in times]
    if len(scored) < 2:
        return None
    # A density has no natural zero, so that only the NLL of classes has a logarithm worth showing.
    log = all(loss > 0 for _, loss, _ in scored) and not results.scored("rmse")
    highest = fence([(loss, method.first) for _, loss, method in scored], log)
    # Those shown at first get the places nearest to their points.
    points = [Point(*p, beyond=p[1] > highest) for p in scored]
    points.sort(key=lambda point: not point.method.first)
    panel = _panel(points, log)
    places = [(panel.at_x(p.time), _TOP if p.beyond else panel.at_y(p.loss)) for p in points]
    inside = Box(panel.left + 4, 22, _WIDTH - 2, panel.height - panel.bottom - 4)
    labels = place_labels(places, [point.text for point in points], inside)
    for point, place, label in zip(points, places, labels, strict=True):
        _draw(panel, point, place, label)
    best, quick = min(points, key=lambda p: p.loss), min(points, key=lambda p: p.time)
    return panel.draw(
        f"NLL against training time of {len(points)} methods: {best.method.name} has the lowest NLL, "
        f"{significant(best.loss)} after {duration(best.time)}; {quick.method.name} is quickest with "
        f"{significant(quick.loss)} after {duration(quick.time)}."
    )


def fence(losses: Sequence[tuple[float, bool]], log: bool) -> float:
    """Return the highest loss inside the chart.

    That is the range of the methods shown at first once more above them, without any that is an outlier by
    Tukey's rule: 1.5 times the spread of the middle half above it.

    Args:
        losses: The losses, and whether each is shown at first.
        log: Whether the axis is logarithmic, which needs losses above 0.

    Example:
        >>> shown = [(loss, True) for loss in (1.0, 1.1, 1.2, 1.3, 9.0)]
        >>> fence([*shown, (1.5, False), (1.7, False)], log=False)
        1.6
    """
    moved = np.asarray([np.log(loss) if log else loss for loss, _ in losses])
    shown = moved[[first for _, first in losses]]
    low, high = np.quantile(moved, [0.25, 0.75])
    least = 0.1 if log else 0.02
    if len(moved) > 3:
        shown = shown[shown <= high + 1.5 * max(high - low, least)]
    end = float(shown.max()) + max(float(np.ptp(shown)), least)
    return float(np.exp(end)) if log else end


def _panel(points: Sequence[Point], log: bool) -> Panel:
    seconds = [p.time for p in points]
    losses = [p.loss for p in points if not p.beyond]
    left, right = min(seconds) / 1.35, max(seconds) * 1.35
    if log:
        bottom, top = min(losses) / 1.06, max(losses) * 1.06
        y = Axis(bottom, top, "NLL, log scale", log_ticks(bottom, top), "{:.3g}".format, np.log10)
    else:
        room = 0.12 * max(max(losses) - min(losses), 0.02)
        bottom, top = min(losses) - room, max(losses) + room
        y = Axis(bottom, top, "NLL", linear_ticks(bottom, top), "{:.4g}".format)
    x = Axis(left, right, "training time, log scale", log_ticks(left, right), _tick, np.log10)
    height = min(320.0 + 6 * max(len(points) - 6, 0), 410.0)
    return Panel(x, y, _WIDTH, height, top=_TOP + 14, right=_RIGHT)


def _draw(panel: Panel, point: Point, place: tuple[float, float], label: Label) -> None:
    index, tag = point.method.index, str(point.method.index)
    if label.away > 1:
        x, y = label.leader(*place)
        panel.add("line", x1=place[0], y1=place[1], x2=x, y2=y, class_="leader", data_m=tag)
    hint = f"{point.method.name}: NLL {significant(point.loss)}, {duration(point.time)}"
    panel.nodes.append(marker(index, *place, "marker big", hint, data_m=tag))
    x, y, anchor = label.anchor(place[0])
    panel.write(point.text, x, y + 4, anchor, "name", data_m=tag)


def _tick(seconds: float) -> str:
    return duration(seconds).replace(".0", "")
