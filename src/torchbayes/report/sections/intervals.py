"""Intervals of a regression: the share of values inside against the share that should be."""

from __future__ import annotations

import numpy as np
import torch

from torchbayes.experiments.saved_predictions import RegressionPredictions
from torchbayes.report.charts import Line, line_chart
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import Results
from torchbayes.report.svg import Array, Axis, percent_tick
from torchbayes.report.wording import fixed, percent, significant

__all__ = ["intervals_section"]

_LEVELS = np.linspace(0.0, 1.0, 101)
_TABLE = (50, 90, 95)


def intervals_section(results: Results) -> Section | None:
    """Plot the coverage of central intervals of every size, and tabulate some with their width."""
    if not results.valued:
        return None
    lines = []
    for method, values in results.valued:
        inside = coverage(values)
        hint = f"{method.name}: {percent(float(inside[90]))} in 90 % intervals"
        lines.append(Line(method, _LEVELS, inside, hint))
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    chart = line_chart(
        lines,
        Axis(0, 1, "share that should be inside", ticks, percent_tick),
        Axis(0, 1, "share of test values inside", ticks, percent_tick),
        f"Coverage of central intervals; {'; '.join(line.hint for line in lines)}.",
        width=600,
        diagonal=True,
    )
    rows = []
    for method, _ in results.valued:
        cells = []
        for level in _TABLE:
            share = method.scores.get(f"coverage{level}")
            width = method.scores.get(f"width{level}")
            cells.append("–" if share is None else percent(share))
            cells.append("–" if width is None else significant(width))
        rows.append((method, cells))
    off = {line.method.name: float(np.abs(line.y - _LEVELS).max()) for line in lines}
    worst = max(lines, key=lambda line: off[line.method.name])
    body = render(
        "intervals.html.j2", chart=chart, rows=rows, levels=_TABLE, worst=worst.method,
        narrow=float((worst.y - _LEVELS).mean()) < 0, gap=fixed(100 * off[worst.method.name], 0),
    )  # fmt: skip
    return Section("intervals", "Intervals", "Do the intervals hold?", body)


def coverage(values: RegressionPredictions) -> Array:
    """Return the share of values inside the central interval of each of 101 levels from 0 to 1.

    A value y is inside the interval of level c if |F(y) − ½| ≤ c/2, where F is the distribution function of
    the mixture over draws.
    """
    means, stds = values.means.double(), values.stds.double()
    below = torch.special.ndtr((values.targets.double() - means) / stds).mean(0)
    distance = 2 * (below - 0.5).abs().flatten().numpy()
    return np.asarray((distance[None] <= _LEVELS[:, None] + 1e-12).mean(1))
