"""Figure of a one-dimensional regression: the curve with its band."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchbayes.likelihood import GaussianNoise, Likelihood
from torchbayes.plots.figure import COLOURS, INK, axes_row
from torchbayes.posterior import Posterior
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import RegressionPredictive

__all__ = ["regression_figure"]


def regression_figure(
    model: nn.Module,
    posterior: Posterior,
    inputs: Tensor,
    targets: Tensor,
    *,
    likelihood: Likelihood | None = None,
    truth: Callable[[Tensor], Tensor] | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
    samples: int = 200,
    generator: torch.Generator | None = None,
) -> Figure:
    """Draw a one-dimensional regression with the band in which new observations should fall.

    Args:
        model: Network, or the wrapper that it was trained in.
        posterior: Posterior to draw from.
        inputs: Training inputs, (examples, 1).
        targets: Training targets, (examples, 1).
        likelihood: Trained likelihood; Gaussian noise of std 1 by default.
        truth: True curve, if it is known.
        transform: Applied to the inputs before the network, such as normalisation.
        samples: Number of draws.
        generator: Random generator.
    """
    if inputs.dim() != 2 or inputs.shape[1] != 1:
        raise ValueError(
            f"inputs have shape {tuple(inputs.shape)}: a curve needs one number per example, (examples, 1)"
        )
    first, last = float(inputs.min()), float(inputs.max())
    low, high = first - 0.5 * (last - first), last + 0.5 * (last - first)
    grid = torch.linspace(low, high, 300, dtype=inputs.dtype).unsqueeze(1)
    likelihood = GaussianNoise() if likelihood is None else likelihood
    taken = grid if transform is None else transform(grid)
    p = predictive(model, posterior, taken, samples, likelihood, generator, recalibrate=False)
    if not isinstance(p, RegressionPredictive):
        raise ValueError(
            "the likelihood is for classes: give one for real targets, such as GaussianNoise"
        )
    x = grid[:, 0].numpy()
    figure, (axes,) = axes_row(1, width=6.4, height=4.0)
    curves = p.means.double().reshape(p.draws, -1)
    low_y, high_y = _column(p.quantile(0.025)), _column(p.quantile(0.975))
    low_curve, high_curve = (_column(curves.quantile(q, 0)) for q in (0.025, 0.975))
    axes.fill_between(
        x, low_y, high_y, color=COLOURS[4], alpha=0.35, lw=0, label="95 % of new observations"
    )
    axes.fill_between(
        x, low_curve, high_curve, color=COLOURS[0], alpha=0.45, lw=0, label="95 % of drawn curves"
    )
    axes.plot(x, _column(p.mean), color=COLOURS[0], lw=2, label="mean")
    if truth is not None:
        axes.plot(x, _column(truth(grid)), color=INK, lw=1.2, ls="--", label="truth")
    axes.plot(_column(inputs), _column(targets), ".", color=COLOURS[5], ms=4, label="training data")
    axes.set_xlabel("input x")
    axes.set_ylabel("target y")
    axes.set_xlim(low, high)
    # The band may grow without bound away from the data; the figure is limited to a few times their range.
    seen = float(targets.min()), float(targets.max())
    room = 1.5 * (seen[1] - seen[0])
    axes.set_ylim(max(seen[0] - room, float(low_y.min())), min(seen[1] + room, float(high_y.max())))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _column(values: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return values.detach().cpu().double().reshape(-1).numpy()
