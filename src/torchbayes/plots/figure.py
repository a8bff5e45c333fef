"""Shared by the matplotlib figures: a colour-blind-safe palette, plain axes, and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchbayes.core.storage import atomic_path

__all__ = ["COLOURS", "INK", "axes_row", "plain", "save_png"]

# Okabe and Ito's palette (2008), in an order in which neighbours differ in lightness too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
INK = "#333333"


def axes_row(
    count: int, *, width: float = 4.6, height: float = 4.0, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Make a figure, outside pyplot's state, with `count` axes side by side.

    Args:
        count: Number of axes.
        width: Width of each in inches.
        height: Height of the figure in inches.
        **options: Arguments of `Figure.subplots`.
    """
    figure = Figure(figsize=(width * count, height), dpi=120, layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, count, **options))
    for one in axes:
        plain(one)
    return figure, list(axes)


def plain(axes: Axes) -> None:
    """Reduce the frame to what is needed to read off numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure to `path` as a whole or not at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
