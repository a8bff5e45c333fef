"""The README's picture: every measured method as a dot, how good it is against what it notices."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from torchbayes.experiments.record import Record
from torchbayes.plots.figure import COLOURS, INK, axes_row
from torchbayes.train.registry import find_method

__all__ = ["headline_picture"]

Array: TypeAlias = npt.NDArray[Any]

# The mark of each family of methods: colour and shape both tell them apart.
_MARKS = {
    "one network": (INK, "o"),
    "ensemble, masks, generator": ("#A8467F", "D"),
    "a Gaussian": (COLOURS[0], "s"),
    "a chain's samples": (COLOURS[5], "^"),
}


def headline_picture(record: Record) -> Figure:
    """Draw every method of the record as a dot: its NLL on test images against what it notices of others."""
    picture, panels = axes_row(2, width=5.2, height=4.9)
    renderer: RendererAgg = FigureCanvasAgg(picture).get_renderer()  # type: ignore[no-untyped-call]
    seen = (("auroc_ood", "Is it less sure about MNIST?"), ("auroc_noise", "… about noise?"))
    for axes, (score, title) in zip(panels, seen, strict=True):
        _dots(axes, record, score)
        axes.set_title(title, color=INK, fontsize=12, fontweight="bold")
        axes.set_xlabel("NLL on test images: further left is better", color=INK, fontsize=10)
    panels[0].set_ylabel("AUROC: higher is better", color=INK, fontsize=10)
    handles = [
        Line2D([], [], color=colour, marker=shape, linestyle="", label=name)
        for name, (colour, shape) in _MARKS.items()
    ]
    picture.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=10)
    picture.draw_without_rendering()
    picture.set_layout_engine("none")  # labels are placed for the axes as they now stand
    for axes, (score, _) in zip(panels, seen, strict=True):
        _names(axes, renderer, record, score)
    return picture


def _dots(axes: Axes, record: Record, score: str) -> None:
    """Draw each method's dot with its spread over seeds, and the corner that beats one network on both."""
    axes.margins(0.1)
    end = _end(record)
    for method, scores in record.rows.items():
        colour, shape = _MARKS[find_method(method).family]
        x, y = scores["nll"], scores[score]
        place = min(x.mean, end)
        axes.errorbar(
            place, y.mean, xerr=x.spread if place < end else None, yerr=y.spread, fmt="none",
            ecolor=colour, alpha=0.4, elinewidth=0.8, zorder=1,
        )  # fmt: skip
        axes.plot(place, y.mean, shape, color=colour, markersize=8, markeredgecolor="white")
    left, right, low, high = axes.axis()
    high = min(high, 1.01)
    axes.axis((left, right, low, high))
    one = record.rows.get("map")
    if one is None:
        return
    corner = one["nll"].mean, one[score].mean
    axes.fill_between([left, corner[0]], corner[1], high, color=COLOURS[2], alpha=0.1, linewidth=0)
    axes.text(
        0.015, 0.985, "better than map on both", transform=axes.transAxes, va="top", fontsize=8.5,
        color="#00694D", style="italic",
    )  # fmt: skip


def _end(record: Record) -> float:
    """End the NLL axis at Tukey's outer fence: a method far out would squeeze all the others."""
    values = [scores["nll"].mean for scores in record.rows.values()]
    first, third = np.quantile(values, [0.25, 0.75])
    return float(third + 3 * (third - first))


def _names(axes: Axes, renderer: RendererAgg, record: Record, score: str) -> None:
    """Write each name beside its dot, where it covers the least of the others."""
    rows, end = record.rows, _end(record)
    losses = {method: scores["nll"].mean for method, scores in rows.items()}
    dots = axes.transData.transform([(min(losses[m], end), rows[m][score].mean) for m in rows])
    labels = [m if losses[m] <= end else f"{m}: NLL {losses[m]:.2f} →" for m in rows]
    texts = [
        axes.text(
            0, 0, label, ha="center", va="center", fontsize=10,
            color=_MARKS[find_method(method).family][0],
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
        for method, label in zip(rows, labels, strict=True)
    ]  # fmt: skip
    boxes = [text.get_window_extent(renderer) for text in texts]
    sizes = np.array([(box.width, box.height) for box in boxes])
    point = axes.figure.dpi / 72  # in pixels
    marks = np.hstack([dots - 4 * point, dots + 4 * point])
    note, frame = (
        np.array(part.get_window_extent(renderer).extents)[None] for part in (axes.texts[0], axes)
    )
    places = [_places(dot, size, point) for dot, size in zip(dots, sizes, strict=True)]
    placed = np.full((len(texts), 4), np.nan)
    for _ in range(4):  # in later rounds the first names make way for the last
        for i, around in enumerate(places):
            obstacles = np.vstack([np.delete(placed, i, 0), marks, note])
            covered = np.nansum(_shared(around, obstacles), 1)
            outside = sizes[i].prod() - _shared(around, frame)[:, 0]
            placed[i] = around[np.argmin(covered + 2 * outside + 0.2 * np.arange(len(around)))]
    back = axes.transData.inverted()
    for text, box, dot in zip(texts, placed, dots, strict=True):
        text.set_position(tuple(back.transform((box[:2] + box[2:]) / 2)))
        near = np.clip(dot, box[:2], box[2:])
        if math.dist(near, dot) > 9 * point:
            axes.plot(
                *back.transform([dot, near]).T, color=text.get_color(), linewidth=0.6, zorder=1
            )


def _places(dot: Array, size: Array, point: float) -> Array:
    """List boxes for a name around its dot, the nearest first: left, bottom, right, top."""
    angles = np.arange(16) * np.pi / 8
    ways = np.stack([np.cos(angles), np.sin(angles)], 1)
    middles = np.vstack([dot + ways * (gap * point + size / 2) for gap in (5.5, 12, 20, 30)])
    return np.hstack([middles - size / 2, middles + size / 2])


def _shared(boxes: Array, others: Array) -> Array:
    """Compute the area that each of `boxes` shares with each of `others`."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    area: Array = np.clip(high - low, 0, None).prod(2)
    return area
