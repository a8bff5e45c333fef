"""Names beside the points of a chart, placed so that none covers another or a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

__all__ = ["Box", "Label", "place_labels"]

# The size of text on narrow screens, where that of a chart is enlarged, in a wide sans serif.
_SIZE, _LINE = 18.0, 21.0
_NARROW, _WIDE, _USUAL = (0.42, "fijlrt-.:'|() "), (0.98, "mwMWQ…@%↑"), 0.66
_POINT = 6.5
_DISTANCES = (0.0, 14.0, 26.0, 40.0, 56.0, 74.0, 96.0, 120.0, 150.0)
_PASSES = 4


class Box(NamedTuple):
    """A rectangle in a picture."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area shared with another box."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(wide, 0.0) * max(high, 0.0)

    def holds(self, x: float, y: float) -> bool:
        """Whether a point is inside."""
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def outside(self, other: Box) -> float:
        """Return by how much this box sticks out of another one."""
        return (
            max(other.left - self.left, 0.0) + max(self.right - other.right, 0.0)
            + max(other.top - self.top, 0.0) + max(self.bottom - other.bottom, 0.0)
        )  # fmt: skip


class Label(NamedTuple):
    """A name's place.

    Attributes:
        box: The room that it takes.
        away: Distance from beside its point; a name that is not beside it needs a leader.
    """

    box: Box
    away: float

    def anchor(self, x: float) -> tuple[float, float, str]:
        """Return position and `text-anchor` of the name: on the side of the point, at x, if it is beside."""
        left, top, right, bottom = self.box
        at, anchor = ((left + right) / 2, "middle")
        if left >= x or right <= x:
            at, anchor = (left, "start") if left >= x else (right, "end")
        return at, (top + bottom) / 2, anchor

    def leader(self, x: float, y: float) -> tuple[float, float]:
        """Return where a leader from the point (x, y) meets the name."""
        box = self.box
        return min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)


def place_labels(
    points: Sequence[tuple[float, float]], texts: Sequence[str], inside: Box
) -> list[Label]:
    """Place every text near its point, the first ones nearest.

    Each text in turn takes the cheapest of some places around its point, and again a few times when all
    others have theirs. Covering a text, a point or the edge costs far more than being away.

    Args:
        points: Positions, also of points that must not be covered.
        texts: The text of each point.
        inside: Where texts may be.

    Example:
        >>> one, two = place_labels([(50, 50), (53, 50)], ["left", "right"], Box(0, 0, 200, 100))
        >>> one.box.overlap(two.box)
        0.0
    """
    marks = [Box(x - _POINT, y - _POINT, x + _POINT, y + _POINT) for x, y in points]
    choices = [
        [label for distance in _DISTANCES for label in _around(x, y, _width(text), distance)]
        for (x, y), text in zip(points, texts, strict=True)
    ]
    placed: dict[int, Label] = {}
    for _ in range(_PASSES):
        for number, around in enumerate(choices):
            others = [label.box for other, label in placed.items() if other != number]
            here = points[number]
            placed[number] = min(
                around, key=partial(_cost, point=here, marks=marks, others=others, inside=inside)
            )
    return [placed[number] for number in range(len(points))]


def _width(text: str) -> float:
    sizes = [next((w for w, of in (_NARROW, _WIDE) if letter in of), _USUAL) for letter in text]
    return _SIZE * sum(sizes)


def _cost(
    label: Label,
    point: tuple[float, float],
    marks: Sequence[Box],
    others: Sequence[Box],
    inside: Box,
) -> float:
    covered = sum(map(label.box.overlap, others)) + sum(map(label.box.overlap, marks))
    cost = label.away + 10 * covered + 100 * label.box.outside(inside)
    if label.away > 1:  # a leader should not run through other names
        (x0, y0), (x1, y1) = point, label.leader(*point)
        steps = [(x0 + t * (x1 - x0), y0 + t * (y1 - y0)) for t in (0.2, 0.4, 0.6, 0.8)]
        cost += 40 * sum(other.holds(x, y) for other in others for x, y in steps)
    return cost


def _around(x: float, y: float, wide: float, distance: float) -> list[Label]:
    """Return places for a text around a point: right, left, above, below and, further away, between."""
    half, high = wide / 2, _LINE / 2
    steps = 4 if distance == 0 else 16
    labels = []
    for step in range(steps):
        angle = 2 * math.pi * step / steps
        cos, sin = math.cos(angle), math.sin(angle)
        # From the point to the middle of the text: past the point, and past half of the text.
        gap = _POINT + 2 + distance
        middle_x, middle_y = x + cos * (gap + half), y - sin * (gap + high)
        box = Box(middle_x - half, middle_y - high, middle_x + half, middle_y + high)
        labels.append(Label(box, distance + (0 if cos > 0.9 else 1)))
    return labels
