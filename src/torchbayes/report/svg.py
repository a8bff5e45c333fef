"""A small plotting kit that draws inline SVG in the page's own colours.

matplotlib's SVG has fixed colours and repeats every style inline; here shapes get classes, which
style.css colours for light, dark and print. ElementTree escapes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

__all__ = [
    "Array", "Axis", "Panel", "colour", "element", "linear_ticks", "log_ticks", "marker", "markup",
    "percent_tick", "thin",
]  # fmt: skip

Array = npt.NDArray[np.float64]

HUES, DASHES = 7, 4
# Eight shapes: methods of one colour, seven apart, differ in shape as well as in dashes.
_MARKERS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-4.9L4.5,3.3H-4.5z",
    "M0,-5.2L5.2,0L0,5.2L-5.2,0z",
    "M0,4.9L4.5,-3.3H-4.5z",
    "M-1.6,-4.8h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2v-3.2h-3.2v-3.2h3.2z",
    "M0,-5.4L1.5,-1.9L5.2,-1.7L2.4,0.8L3.3,4.4L0,2.4L-3.3,4.4L-2.4,0.8L-5.2,-1.7L-1.5,-1.9z",
    "M-4.6,-4.6L0,-2.2L4.6,-4.6L2.2,0L4.6,4.6L0,2.2L-4.6,4.6L-2.2,0z",
)


def colour(index: int) -> str:
    """Return the CSS classes for a method's colour and, past seven methods, its dashes."""
    dash = index // HUES % DASHES
    return f"m{index % HUES}" + (f" d{dash}" if dash else "")


def element(
    tag: str, *children: ElementTree.Element | str, **attributes: str | float
) -> ElementTree.Element:
    """Build an SVG element; `class_` means class, and underscores in names become hyphens."""
    node = ElementTree.Element(tag)
    for name, value in attributes.items():
        text = value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        node.set(name.rstrip("_").replace("_", "-") if name != "viewBox" else name, text)
    for child in children:
        if isinstance(child, str):
            node.text = child
        else:
            node.append(child)
    return node


def markup(node: ElementTree.Element) -> Markup:
    """Serialise an element so that templates insert it unescaped."""
    return Markup(ElementTree.tostring(node, encoding="unicode"))


def percent_tick(value: float) -> str:
    """Format a share of one as a percentage without trailing zeros."""
    return f"{100 * value:.4g} %"


def marker(
    index: int, x: float, y: float, class_: str = "marker", hint: str = "", **attributes: str
) -> ElementTree.Element:
    """Return the marker in a method's colour; its shape helps readers who see few colours."""
    return element(
        "path", *_hint(hint), d=_MARKERS[index % len(_MARKERS)], class_=f"{class_} {colour(index)}",
        transform=f"translate({x:.1f},{y:.1f})", **attributes,
    )  # fmt: skip


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`.

    Example:
        >>> linear_ticks(0.0, 1.03)
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    # Imported here because it takes a third of a second, too long for `import torchbayes.report`.
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [float(tick) for tick in ticks if low - slack <= tick <= high + slack]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten from `low` to `high`, with numbers in between if there are few decades or none.

    Example:
        >>> log_ticks(0.8, 25.0)
        [1.0, 2.0, 5.0, 10.0, 20.0]
    """
    from matplotlib.ticker import LogLocator

    if high / low < 3:
        return linear_ticks(low, high)
    subs = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0) if high / low > 6 else (1, 2, 3, 4, 5, 7)
    ticks = LogLocator(subs=subs, numticks=12).tick_values(low, high)
    return [float(tick) for tick in ticks if low <= tick <= high]


def _same(values: Array) -> Array:
    return values


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        low: Value at its start.
        high: Value at its end.
        label: Quantity it measures.
        ticks: Values to label.
        show: Formats a tick's value.
        transform: Scale, such as `numpy.log10`.
    """

    low: float
    high: float
    label: str
    ticks: Sequence[float]
    show: Callable[[float], str] = "{:g}".format
    transform: Callable[[Array], Array] = _same

    def place(self, values: Array | float) -> Array:
        """Map values to positions from 0 to 1; values beyond the ends fall outside."""
        ends = self.transform(np.asarray([self.low, self.high], dtype=np.float64))
        moved = self.transform(np.asarray(values, dtype=np.float64))
        return np.asarray((moved - ends[0]) / (ends[1] - ends[0]))

    def describe(self, start: float, end: float) -> str:
        """Return the scale for the page's script: ends, their positions, kind, unit and label.

        Args:
            start: Position of the start of the axis in the picture.
            end: Position of its end.
        """
        kind = "linear" if self.transform is _same else "log"
        unit = "%" if self.show(0.5).endswith("%") else ""
        numbers = [f"{value:.6g}" for value in (self.low, self.high, start, end)]
        return "|".join([*numbers, kind, unit, self.label])


@dataclass
class Panel:
    """A rectangle with two axes to draw shapes in.

    Attributes:
        x: Horizontal axis.
        y: Vertical axis.
        width: Width of the whole picture.
        height: Height of the whole picture.
        left: Left margin, for the numbers of the vertical axis.
        top: Top margin.
        bottom: Bottom margin, for the numbers of the horizontal axis.
        right: Right margin.
        nodes: Elements drawn so far.
    """

    x: Axis
    y: Axis
    width: float = 420
    height: float = 290
    left: float = 56
    top: float = 26
    bottom: float = 44
    right: float = 14
    nodes: list[ElementTree.Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Draw the grid and the numbers first so that shapes lie on top."""
        x0, x1, y0, y1 = *self._span_x(), *self._span_y()
        for tick in self.y.ticks:
            at = self.at_y(tick)
            self.add("line", x1=x0, x2=x1, y1=at, y2=at, class_="grid")
            self.write(self.y.show(tick), x0 - 7, at + 4, anchor="end")
        for tick in self.x.ticks:
            at = self.at_x(tick)
            self.add("line", x1=at, x2=at, y1=y0, y2=y0 + 4, class_="axis")
            self.write(self.x.show(tick), at, y0 + 17)
        self.add("line", x1=x0, x2=x1, y1=y0, y2=y0, class_="axis")
        self.write(self.x.label, (x0 + x1) / 2, self.height - 6, class_="label")
        self.write(self.y.label, 2, y1 - 11, anchor="start", class_="label")

    def _span_x(self) -> tuple[float, float]:
        return self.left, self.width - self.right

    def _span_y(self) -> tuple[float, float]:
        return self.height - self.bottom, self.top

    def at_x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        low, high = self._span_x()
        return low + float(self.x.place(value)) * (high - low)

    def at_y(self, value: float) -> float:
        """Return the vertical position of a value."""
        low, high = self._span_y()
        return low + float(self.y.place(value)) * (high - low)

    def points(self, x: Array, y: Array) -> Array:
        """Return the positions (N, 2) of many values."""
        (x0, x1), (y0, y1) = self._span_x(), self._span_y()
        return np.stack([x0 + self.x.place(x) * (x1 - x0), y0 + self.y.place(y) * (y1 - y0)], 1)

    def add(
        self, tag: str, *children: ElementTree.Element | str, **attributes: str | float
    ) -> None:
        """Draw an element."""
        self.nodes.append(element(tag, *children, **attributes))

    def write(
        self, text: str, x: float, y: float, anchor: str = "middle", class_: str = "tick",
        **attributes: str,
    ) -> None:  # fmt: skip
        """Write text at a position in the picture."""
        self.add("text", text, x=x, y=y, text_anchor=anchor, class_=class_, **attributes)

    def line(self, x: Array, y: Array, class_: str, hint: str = "", **attributes: str) -> None:
        """Draw a line; `hint` is shown when the pointer rests on it."""
        path = "M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in thin(self.points(x, y)))
        self.add("path", *_hint(hint), d=path, class_=class_, **attributes)

    def area(self, x: Array, low: Array, high: Array, class_: str, **attributes: str) -> None:
        """Fill the area between two lines."""
        outline = np.concatenate([self.points(x, high), self.points(x, low)[::-1]])
        path = "M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in outline) + "z"
        self.add("path", d=path, class_=class_, **attributes)

    def bar(self, x0: float, x1: float, y0: float, y1: float, class_: str, hint: str = "") -> None:
        """Draw a rectangle between values."""
        left, right = self.at_x(x0), self.at_x(x1)
        top, bottom = sorted((self.at_y(y0), self.at_y(y1)))
        gap = 0.75 if right - left > 4 else 0.0
        width = max(right - left - 2 * gap, 0.5)
        place = {"x": left + gap, "y": top, "width": width, "height": bottom - top}
        self.add("rect", *_hint(hint), **place, class_=class_)

    def frame(self, nodes: Sequence[ElementTree.Element]) -> None:
        """Draw elements of which nothing is shown beyond the axes, but for half the size of a marker."""
        (x0, x1), (y0, y1) = self._span_x(), self._span_y()
        x, y, wide, high = x0 - 5, y1 - 5, x1 - x0 + 10, y0 - y1 + 10
        box = f"{x:g} {y:g} {wide:g} {high:g}"
        place = {"x": x, "y": y, "width": wide, "height": high}
        self.add("svg", *nodes, **place, viewBox=box, class_="frame", aria_hidden="true")

    def draw(self, name: str, read_off: bool = False) -> Markup:
        """Return the finished picture.

        Args:
            name: Text alternative for screen readers.
            read_off: Whether the page's script should show the values of the lines at the pointer; it
                computes them from the lines and the scales stored here.
        """
        attributes = {
            "viewBox": f"0 0 {self.width:g} {self.height:g}",
            "role": "img",
            "aria_label": name,
            "class_": "plot wide" if self.width >= 500 else "plot",
        }
        if read_off:
            attributes["data_x"] = self.x.describe(*self._span_x())
            attributes["data_y"] = self.y.describe(*self._span_y())
        return markup(element("svg", *self.nodes, **attributes))


def _hint(text: str) -> list[ElementTree.Element]:
    return [element("title", text)] if text else []


def thin(points: Array, distance: float = 0.7) -> Array:
    """Drop points that share a cell, less than a pixel wide, with their predecessor; keep both ends.

    Example:
        >>> thin(np.asarray([[0.0, 0.0], [0.1, 0.0], [0.2, 0.0], [9.0, 9.0]])).tolist()
        [[0.0, 0.0], [9.0, 9.0]]
    """
    cells = np.round(points / distance)
    keep = np.ones(len(points), dtype=bool)
    keep[1:-1] = np.any(cells[1:-1] != cells[:-2], axis=1)
    return points[keep]
