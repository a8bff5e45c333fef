"""The loss landscape around a training path, on the plane in which the path moves most.

HWA paper, section 3.3: a PCA plane of the iterates, with the train loss and the test error as contours and
the iterates, the ends of the cycles and the average drawn in.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from torch import nn

from torchbayes.core.batch import arguments, batch_len, split_batch, to_device
from torchbayes.likelihood import Categorical, Likelihood
from torchbayes.plots.figure import COLOURS, axes_row
from torchbayes.posterior import Weights, Wrapper
from torchbayes.predict.batchnorm import recalibrate_batchnorm

__all__ = ["Landscape", "Plane", "landscape", "landscape_figure", "pca_plane"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Plane:
    """A plane in the space of weights.

    Attributes:
        origin: Weights at (0, 0), and whatever is constant over the plane, such as buffers.
        axes: Two perpendicular directions of length 1.
        explained: Shares of the path's variance along them.
    """

    origin: Weights
    axes: tuple[Weights, Weights]
    explained: tuple[float, float]

    def project(self, weights: Weights) -> tuple[float, float]:
        """Return the coordinates of the point of the plane nearest to `weights`."""
        x, y = (
            sum(
                float(((weights[name].cpu() - self.origin[name]) * direction).double().sum())
                for name, direction in axis.items()
            )
            for axis in self.axes
        )
        return x, y

    def at(self, x: float, y: float) -> Weights:
        """Return the weights at a point of the plane."""
        moved = {
            name: self.origin[name] + x * self.axes[0][name] + y * self.axes[1][name]
            for name in self.axes[0]
        }
        return dict(self.origin) | moved


def pca_plane(trajectory: Iterable[Weights], names: Collection[str] | None = None) -> Plane:
    """Return the plane through the mean of a path of weights along which the path varies most.

    Args:
        trajectory: At least three sets of weights, such as a `Samples` filled during training.
        names: Names of the weights that span the plane, such as `dict(model.named_parameters())`: needed
            if the sets also hold running statistics. By default all floating-point entries.

    """
    sets = list(trajectory)
    if len(sets) < 3:
        raise ValueError(
            f"the trajectory has {len(sets)} sets of weights: a plane needs at least 3"
        )
    last = {name: tensor.detach().cpu() for name, tensor in sets[-1].items()}
    used = [
        name
        for name, tensor in last.items()
        if (tensor.is_floating_point() if names is None else name in names)
    ]
    rows = [torch.cat([s[name].detach().cpu().reshape(-1) for name in used]) for s in sets]
    matrix = torch.stack(rows).numpy()
    with np.errstate(invalid="ignore"):  # shares of zero variance: refused below
        pca = PCA(n_components=2, svd_solver="full").fit(matrix)
    if not pca.explained_variance_[1] > np.finfo(matrix.dtype).eps * pca.explained_variance_[0]:
        raise ValueError(
            "the trajectory varies in fewer than two directions: give sets of weights that differ"
        )

    def unflatten(vector: Any) -> Weights:
        parts = torch.from_numpy(vector).split([last[name].numel() for name in used])
        return {n: p.reshape(last[n].shape) for n, p in zip(used, parts, strict=True)}

    return Plane(
        last | unflatten(pca.mean_),
        (unflatten(pca.components_[0]), unflatten(pca.components_[1])),
        (float(pca.explained_variance_ratio_[0]), float(pca.explained_variance_ratio_[1])),
    )


@dataclass(frozen=True, eq=False)
class Landscape:
    """Loss and error on a grid of a plane.

    Attributes:
        plane: The plane.
        x: Grid coordinates along the first axis.
        y: Grid coordinates along the second axis.
        loss: Mean training loss in nats per example, (y, x).
        error: Test error, (y, x): share of wrong classes, or root mean square error.
        classes: Whether `error` is a share of wrong classes.
    """

    plane: Plane
    x: Array
    y: Array
    loss: Array
    error: Array
    classes: bool


def landscape(
    model: nn.Module,
    plane: Plane,
    show: Iterable[Weights],
    train: Iterable[Any],
    test: Iterable[Any],
    *,
    likelihood: Likelihood | None = None,
    points: int = 21,
    calibrate: Iterable[Any] | None = None,
) -> Landscape:
    """Evaluate a network on a grid over the part of a plane that holds some weights, with a margin.

    Each of the points² grid points costs a pass over both data sets: a few thousand examples of each are
    enough for a picture.

    Args:
        model: The network, or the wrapper that it was trained in.
        plane: The plane, as `pca_plane` gives it.
        show: Weights whose projections must be inside: the iterates and the average.
        train: Batches of inputs and targets for the loss, iterated many times: a list or a loader.
        test: Batches of inputs and targets for the error.
        likelihood: Likelihood of the outputs; class logits by default.
        points: Grid points along each side.
        calibrate: For networks with batch norm: batches to re-estimate its statistics with at every
            point. Without them all points share the statistics of the path's last weights, and far from
            there the landscape says more about those than about the weights.
    """
    likelihood = Categorical() if likelihood is None else likelihood
    twin = copy.deepcopy(model.model if isinstance(model, Wrapper) else model).eval()
    x, y = (_ticks(side, points) for side in zip(*map(plane.project, show), strict=True))
    loss, error = np.empty((points, points)), np.empty((points, points))
    classes = True
    for row, column in np.ndindex(points, points):
        weights = plane.at(x[column], y[row])
        if calibrate is not None:
            weights = recalibrate_batchnorm(twin, weights, calibrate)
        loss[row, column], _, _ = _scores(twin, weights, train, likelihood)
        _, error[row, column], classes = _scores(twin, weights, test, likelihood)
    return Landscape(plane, x, y, loss, error, classes)


def _ticks(values: Sequence[float], points: int) -> Array:
    low, high = min(values), max(values)
    margin = 0.3 * (high - low)
    if not margin > 0:
        raise ValueError("all weights to show lie on one point of the plane: give some that differ")
    return np.linspace(low - margin, high + margin, points)


@torch.no_grad()
def _scores(
    model: nn.Module, weights: Weights, batches: Iterable[Any], likelihood: Likelihood
) -> tuple[float, float, bool]:
    device = next(iter(model.parameters())).device
    used = {name: tensor.to(device) for name, tensor in weights.items()}
    loss, wrong, count, classes = 0.0, 0.0, 0, True
    for batch in batches:
        inputs, targets = split_batch(batch)
        if targets is None:
            raise ValueError("the batches have no targets: give pairs of inputs and targets")
        args, kwargs = arguments(to_device(inputs, device))
        outputs, targets = torch.func.functional_call(model, used, args, kwargs), targets.to(device)
        size = batch_len(inputs)
        loss, count = loss + float(likelihood.loss(outputs, targets)) * size, count + size
        guess = likelihood.predictive(outputs.unsqueeze(0)).prediction
        classes = not guess.is_floating_point()
        missed = guess != targets if classes else (guess - targets.reshape(guess.shape)).square()
        wrong += float(missed.double().mean()) * size
    if count == 0:
        raise ValueError(
            "there are no batches to evaluate: give a list or a loader that can be repeated"
        )
    return loss / count, wrong / count if classes else (wrong / count) ** 0.5, classes


def landscape_figure(
    surface: Landscape,
    iterates: Sequence[Weights],
    cycle_ends: Sequence[int] = (),
    averages: Mapping[str, Weights] | None = None,
) -> Figure:
    """Draw the train loss and the test error side by side, with the path over them.

    Args:
        surface: Result of `landscape`.
        iterates: Weights along the path, in order.
        cycle_ends: Indices of the iterates that end a learning-rate cycle.
        averages: Averaged weights by name, such as `{"SWA": swa.mean()}`.
    """
    figure, panels = axes_row(2, width=5.6, height=4.8, sharex=True, sharey=True)
    error = (
        ("test error in %", 100 * surface.error)
        if surface.classes
        else ("test RMSE", surface.error)
    )
    path = np.array([surface.plane.project(weights) for weights in iterates])
    for axes, (title, values) in zip(
        panels, [("train loss in nats", surface.loss), error], strict=True
    ):
        _contours(figure, axes, surface, values)
        axes.set_title(title, fontsize=11)
        axes.plot(*path.T, color="white", lw=2.6)
        axes.plot(*path.T, "o-", color="black", lw=1, ms=3, label="iterates")
        axes.plot(*path[0], "s", color="white", mec="black", ms=8, label="start of the path")
        if len(cycle_ends):
            ends = path[list(cycle_ends)].T
            axes.plot(
                *ends, "D", color=COLOURS[1], mec="black", ms=6, ls="none", label="cycle ends"
            )
        for number, (name, weights) in enumerate(
            (averages if averages is not None else {}).items()
        ):
            place, colour = surface.plane.project(weights), (COLOURS[5], COLOURS[3])[number % 2]
            axes.plot(
                *place, "*^"[number % 2], color=colour, mec="black", ms=16, ls="none", label=name
            )
        axes.set_xlabel(
            f"principal component 1 ({surface.plane.explained[0]:.0%} of the path's variance)"
        )
        if 1 / 3 < np.ptp(surface.x) / np.ptp(surface.y) < 3:
            axes.set_aspect("equal")
    panels[0].set_ylabel(f"principal component 2 ({surface.plane.explained[1]:.0%})")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _contours(figure: Figure, axes: Axes, surface: Landscape, values: Array) -> None:
    low, high = float(values.min()), float(np.quantile(values, 0.9))
    # Finer steps near the bottom, where the path is; far up the slope only its direction matters.
    steps = np.geomspace(0.01, 1, 10) * max(high - low, 1e-12)
    levels = low + np.concatenate([[0.0], steps])
    norm = BoundaryNorm(levels, colormaps["cividis_r"].N, extend="max")
    filled = axes.contourf(
        surface.x, surface.y, values, levels, cmap="cividis_r", norm=norm, extend="max"
    )
    bar = figure.colorbar(filled, ax=axes, shrink=0.85, ticks=levels)
    bar.ax.set_yticklabels([f"{level:.3g}" for level in levels], fontsize=8)
