"""What trained weights look like: their distribution, and their signal-to-noise ratio.

Bayes by Backprop (Blundell et al. 2015), Figure 2 of the summary: histograms of the weights of networks
trained by SGD, with dropout and by Bayes by Backprop; and the density and distribution of the
signal-to-noise ratio |μ|/σ, by which weights are pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchbayes.applications.prune import signal_to_noise
from torchbayes.plots.figure import COLOURS, INK, axes_row
from torchbayes.posterior import Gaussian, Posterior, Wrapper

__all__ = ["snr_figure", "weight_figure"]

Array = npt.NDArray[np.float64]


def weight_figure(
    model: nn.Module,
    posteriors: Mapping[str, Posterior],
    *,
    span: float | None = None,
    generator: torch.Generator | None = None,
) -> Figure:
    """Draw side-by-side histograms of one draw of the weights from each posterior.

    Only matrices and kernels are counted, not biases and norm layers' scales. All panels share their axes,
    so that widths and heights can be compared.

    Args:
        model: Network that all the posteriors belong to.
        posteriors: Posteriors by name, such as SGD, dropout and BBB.
        span: Largest |weight| shown; by default the 99.9 % quantile of the widest posterior.
        generator: Random generator for the draws.
    """
    if not posteriors:
        raise ValueError("there are no posteriors to draw: give at least one with its name")
    network = model.model if isinstance(model, Wrapper) else model
    names = [name for name, p in network.named_parameters() if p.dim() > 1]
    if not names:
        raise ValueError(f"{type(network).__name__} has no weight matrices or kernels to draw")
    draws: dict[str, Array] = {}
    for label, posterior in posteriors.items():
        posterior.check(network)
        draw = posterior.sample(generator)
        draws[label] = _flat([draw[name] for name in names])
    if span is None:
        span = max(float(np.quantile(np.abs(values), 0.999)) for values in draws.values())
    figure, panels = axes_row(len(draws), width=3.6, height=3.4, sharex=True, sharey=True)
    edges = np.linspace(-span, span, _bins(draws.values()))
    for number, (axes, (label, values)) in enumerate(zip(panels, draws.items(), strict=True)):
        # Normalised by all weights, so that what is cut off at the sides does not inflate the middle.
        density = np.histogram(values, edges)[0] / len(values) / np.diff(edges)
        colour = COLOURS[number % len(COLOURS)]
        axes.stairs(density, edges, fill=True, color=colour, alpha=0.35)
        axes.stairs(density, edges, color=colour, lw=1.4)
        axes.set_title(label, fontsize=11)
        axes.set_xlabel("weight")
        axes.text(
            0.97, 0.95, f"std {values.std():.3g}", transform=axes.transAxes, ha="right", va="top",
            color=INK, fontsize=9,
        )  # fmt: skip
    panels[0].set_ylabel("density (log scale)")
    panels[0].set_yscale("log")
    panels[0].set_xlim(-span, span)
    panels[0].locator_params(axis="x", nbins=4)
    return figure


def snr_figure(posteriors: Mapping[str, Gaussian], fractions: Sequence[float] = (0.75,)) -> Figure:
    """Draw the density and the distribution function of the weights' signal-to-noise ratios.

    Args:
        posteriors: Posteriors by name.
        fractions: Shares of weights to mark: pruning that share removes what is left of the mark.
    """
    ratios = {label: signal_to_noise(q).values.numpy() for label, q in posteriors.items()}
    if not any(np.isfinite(values).any() for values in ratios.values()):
        raise ValueError(
            "no weight has a signal-to-noise ratio: give posteriors that are not pruned away"
        )
    figure, (density, cumulative) = axes_row(2, width=4.6, height=3.6, sharex=True)
    finite = np.concatenate([values[np.isfinite(values)] for values in ratios.values()])
    # Dead weights have ratios down to −100 dB: a long empty tail that would squeeze the rest together.
    low, high = np.quantile(finite, [0.025, 1.0])
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, _bins(ratios.values()))
    for number, (label, values) in enumerate(ratios.items()):
        colour = COLOURS[number % len(COLOURS)]
        heights = np.histogram(values, edges)[0] / len(values) / np.diff(edges)
        density.stairs(heights, edges, color=colour, lw=1.6, label=label)
        shares = np.searchsorted(values, edges, side="right") / len(values)
        cumulative.plot(edges, shares, color=colour, lw=1.6, label=label)
        for fraction in fractions:
            cut = values[min(int(fraction * len(values)), len(values) - 1)]
            for axes in (density, cumulative) if np.isfinite(cut) else ():
                axes.axvline(float(cut), color=colour, lw=1, ls="--")
    for fraction in fractions:
        cumulative.axhline(fraction, color=INK, lw=0.8, ls=":")
        cumulative.annotate(
            f"{fraction:.0%}", (float(low), fraction), xytext=(4, 3), textcoords="offset points",
            color=INK, fontsize=9,
        )  # fmt: skip
    density.set_ylabel("density per dB")
    cumulative.set_ylabel("share of weights below")
    cumulative.set_ylim(0, 1.02)
    for axes in (density, cumulative):
        axes.set_xlabel("signal-to-noise ratio |μ|/σ in dB")
        axes.set_xlim(float(low), float(high))
    if len(ratios) > 1:
        density.legend(frameon=False, fontsize=9)
    return figure


def _bins(groups: Iterable[Array]) -> int:
    """Return as many bin edges as the smallest group can fill (Rice's rule), for 40 to 120 bins."""
    return int(np.clip(2 * min(map(len, groups)) ** (1 / 3), 41, 121))


def _flat(tensors: Sequence[Tensor]) -> Array:
    parts = [tensor.detach().cpu().double().reshape(-1) for tensor in tensors]
    return np.asarray(torch.cat(parts).numpy()) if parts else np.empty(0)
