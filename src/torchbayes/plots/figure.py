"""What the matplotlib pictures share: colours that colour-blind eyes tell apart, and plain axes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["COLOURS", "INK", "axes_row", "plain"]

# Okabe and Ito's palette (2008), in an order in which neighbours differ in lightness too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
INK = "#333333"


def axes_row(
    count: int, *, width: float = 4.6, height: float = 4.0, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A new figure, outside of pyplot's state, with `count` axes beside each other.

    Args:
        count: The number of axes.
        width: The inches of each.
        height: The inches of the figure.
        **options: Of `Figure.subplots`.
    """
    figure = Figure(figsize=(width * count, height), dpi=120, layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, count, **options))
    for one in axes:
        plain(one)
    return figure, list(axes)


def plain(axes: Axes) -> None:
    """Leave of the frame what is needed to read numbers off."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
