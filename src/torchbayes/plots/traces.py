"""Trace plots of a sampler's chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from torchbayes.plots.figure import COLOURS, INK, plain

__all__ = ["trace_figure"]

_PANELS = {
    "energy": "energy: −log posterior, by one batch",
    "temperature": "kinetic temperature (1 is right)",
    "thermostat": "thermostat ξ, mean",
    "update_size": "update size, root mean square",
}
_FEW = (
    6  # layers that get a colour and a name each; more are drawn thin and grey, with their median
)


def trace_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the energy of every chain, and temperature, thermostat and update size of every layer.

    Args:
        rows: Lines of a run's traces.jsonl.
    """
    shown = [name for name in _PANELS if any(name in row for row in rows)]
    figure = Figure(figsize=(9.6, 2.3 * len(shown)), dpi=120, layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(shown), 1, sharex=True))
    chains = sorted({row["chain"] for row in rows})
    for panel, name in zip(axes, shown, strict=True):
        plain(panel)
        panel.set_title(_PANELS[name], fontsize=10, loc="left", color=INK)
        for place, chain in enumerate(chains):
            own = [row for row in rows if row["chain"] == chain and name in row]
            at = [row["update"] for row in own]
            if name == "energy":
                label = f"chain {chain}" if len(chains) > 1 else None
                colour = COLOURS[place % len(COLOURS)]
                panel.plot(at, [row[name] for row in own], color=colour, lw=1, label=label)
                continue
            layers = list(own[0][name]) if own else []
            values = np.asarray([[row[name][layer] for layer in layers] for row in own])
            if len(layers) <= _FEW:
                for layer, column, colour in zip(layers, values.T, COLOURS, strict=False):
                    label = None if place else layer or "weights"
                    panel.plot(at, column, color=colour, lw=1, label=label)
            else:
                panel.plot(at, values, color="#999999", lw=0.5, alpha=0.6)
                label = None if place else f"median of {len(layers)} layers"
                panel.plot(at, np.median(values, axis=1), color=COLOURS[0], lw=1.6, label=label)
        if name == "temperature":
            panel.axhline(1, color=INK, lw=0.8, ls=":")
        if name in ("temperature", "update_size"):
            panel.set_ylim(bottom=0)
        if panel.get_legend_handles_labels()[0]:
            # Beside the title, where there are no lines.
            panel.legend(
                fontsize=8, frameon=False, ncols=_FEW, loc="lower right", bbox_to_anchor=(1, 0.98)
            )
    axes[-1].set_xlabel("update", fontsize=9, color=INK)
    return figure
