"""Figure of the test error against the share of weights removed, and of their signal-to-noise ratios."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from torchbayes.applications.prune import signal_to_noise
from torchbayes.plots.figure import COLOURS, INK, axes_row
from torchbayes.posterior import Gaussian

__all__ = ["pruning_figure"]


def pruning_figure(posterior: Gaussian, errors: Sequence[tuple[float, float]]) -> Figure:
    """Draw the density of the weights' signal-to-noise ratio and the error after pruning.

    Args:
        posterior: Posterior before pruning.
        errors: Pairs of the share of weights removed and the resulting test error.
    """
    figure, (left, right) = axes_row(2, width=4.8, height=3.6)
    ratios = signal_to_noise(posterior)
    left.stairs(
        ratios.density.numpy(), ratios.edges.numpy(), fill=True, color=COLOURS[0], alpha=0.5
    )
    marks = [share for share, _ in errors if 0 < share < 1]
    for place, share in enumerate(marks):
        at = float(ratios.values[int(share * len(ratios.values))])  # they are sorted
        left.axvline(at, color=INK, linewidth=0.8, linestyle=":")
        # Large shares lie close together: each label is a little lower than the one before it.
        left.annotate(f"{share:.0%}", (at, 0.98 - 0.07 * place), xycoords=("data", "axes fraction"),
                      xytext=(3, 0), textcoords="offset points", fontsize=8, va="top")  # fmt: skip
    left.set_xlabel("signal-to-noise ratio |μ|/σ (dB)")
    left.set_ylabel("share of the weights per dB")
    shares, values = zip(*errors, strict=True)
    right.plot([100 * s for s in shares], [100 * v for v in values], "o-", color=COLOURS[0])
    for share, value in errors:
        right.annotate(f"{value:.2%}", (100 * share, 100 * value), xytext=(0, 7), fontsize=8,
                       textcoords="offset points", ha="center")  # fmt: skip
    right.set_xlabel("weights removed (%)")
    right.set_ylabel("test error (%)")
    right.margins(0.08, 0.15)
    right.set_ylim(bottom=0)
    return figure
