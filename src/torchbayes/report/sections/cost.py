"""A chart of quality against cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Axis, Panel, linear_ticks, log_ticks, marker
from torchbayes.report.wording import duration, significant

__all__ = ["cost_chart"]

_LETTER, _LINE = 7.0, 13.0


class Label(NamedTuple):
    """A name beside a point: its position, anchor and horizontal extent."""

    x: float
    y: float
    anchor: str
    left: float
    right: float

    def overlap(self, left: float, right: float, middle: float, half: float) -> float:
        """Return the area shared with another box."""
        wide = min(self.right, right) - max(self.left, left)
        high = _LINE / 2 + half - abs(self.y - 4 - middle)
        return max(wide, 0.0) * max(high, 0.0)


def cost_chart(results: Results) -> Markup | None:
    """Plot NLL against training time: further left is cheaper, lower is better."""
    times = {m.name: t for t, m in results.scored("seconds") if t > 0}
    points = [(times[m.name], v, m) for v, m in results.scored("nll") if m.name in times]
    if len(points) < 2:
        return None
    seconds, losses = np.asarray([p[0] for p in points]), np.asarray([p[1] for p in points])
    low, high = float(seconds.min()) / 1.5, float(seconds.max()) * 2.2
    room = max(float(np.ptp(losses)), 0.1 * float(np.abs(losses).max()), 1e-6) * 0.18
    bottom, top = float(losses.min()) - room, float(losses.max()) + room
    panel = Panel(
        Axis(low, high, "training time", log_ticks(low, high), _tick, np.log10),
        Axis(bottom, top, "NLL, lower is better", linear_ticks(bottom, top), "{:.3g}".format),
        width=520,
        height=min(290 + 12 * max(len(points) - 6, 0), 440),
    )
    for time, loss, method in points:
        index, place = method.index, (panel.at_x(time), panel.at_y(loss))
        hint = f"{method.name}: NLL {significant(loss)}, {duration(time)}"
        panel.nodes.append(marker(index, *place, "marker big", hint, data_m=str(index)))
    for label, (_, _, method) in zip(_labels(panel, points), points, strict=True):
        panel.write(method.name, label.x, label.y, label.anchor, "name", data_m=str(method.index))
    best = min(points, key=lambda point: point[1])
    quick = min(points, key=lambda point: point[0])
    return panel.draw(
        f"NLL against training time of {len(points)} methods: {best[2].name} has the lowest NLL, "
        f"{significant(best[1])} after {duration(best[0])}; {quick[2].name} is quickest with "
        f"{significant(quick[1])} after {duration(quick[0])}."
    )


def _tick(seconds: float) -> str:
    return duration(seconds).replace(".0", "")


def _labels(panel: Panel, points: list[tuple[float, float, MethodResult]]) -> list[Label]:
    """Place every name beside, above or below its point, wherever it covers least."""
    places = [(panel.at_x(time), panel.at_y(loss)) for time, loss, _ in points]
    labels: list[Label] = []
    for (x, y), (_, _, method) in zip(places, points, strict=True):
        wide = _LETTER * len(method.name)
        choices = (
            Label(x + 9, y + 4, "start", x + 9, x + 9 + wide),
            Label(x - 9, y + 4, "end", x - 9 - wide, x - 9),
            Label(x, y - 9, "middle", x - wide / 2, x + wide / 2),
            Label(x, y + 18, "middle", x - wide / 2, x + wide / 2),
        )
        costs = []
        for choice in choices:
            outside = max(choice.right - panel.width, panel.left - choice.left, 0.0) * _LINE
            marks = sum(choice.overlap(px - 6, px + 6, py, 6.0) for px, py in places)
            names = sum(choice.overlap(o.left, o.right, o.y - 4, _LINE / 2) for o in labels)
            costs.append(outside + marks + names)
        labels.append(choices[int(np.argmin(costs))])
    return labels
