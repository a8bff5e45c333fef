"""The pictures of docs/results.md, drawn from the records, and how a picture knows its source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from tools.records.headline import headline_picture
from tools.records.readme import HEADLINE
from torchbayes.core.storage import atomic_path
from torchbayes.experiments.record import Bins, Record
from torchbayes.plots.figure import COLOURS, INK, axes_row

__all__ = ["Picture", "calibration_picture", "curves_picture", "pictures_of"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """A picture of measured figures.

    Attributes:
        name: File name.
        alt: Text for readers who cannot see it.
        caption: What the reader must know to read it.
        figures: The figures that it shows, as JSON can hold them.
        draw: Draws it.
    """

    name: str
    alt: str
    caption: str
    figures: Any
    draw: Callable[[], Figure]

    def save(self, folder: Path) -> None:
        """Draw the picture, with a note in the file of what it was drawn from."""
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / self.name) as temporary:
            self.draw().savefig(temporary, format="png", metadata={"Description": self._source()})

    def is_in(self, folder: Path) -> bool:
        """Tell whether the folder has this picture, drawn from these figures."""
        file = folder / self.name
        if not file.is_file():
            return False
        with Image.open(file) as image:
            return bool(image.info.get("Description") == self._source())

    def _source(self) -> str:
        """Digest the figures: the bytes of a picture depend on the machine's fonts, its figures do not."""
        content = json.dumps(self.figures, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def pictures_of(records: Mapping[str, Record]) -> dict[str, list[Picture]]:
    """List the pictures that the records allow, by recipe."""
    found: dict[str, list[Picture]] = {}
    for recipe, make in _PICTURES.items():
        picture = make(records[recipe]) if recipe in records else None
        if picture is not None:
            found[recipe] = [picture]
    return found


def _file_name(record: Record, kind: str) -> str:
    return f"{record.recipe.replace('/', '-')}-{kind}.png"


def _curves(record: Record) -> Picture | None:
    rows = {row: scores for row, scores in record.curves.items() if "validation_nll" in scores}
    if not rows:
        return None
    last = ", ".join(
        f"{row} {np.mean([seed[-1] for seed in scores['validation_nll']]):.3f}"
        for row, scores in rows.items()
    )
    seeds = len(record.seeds)
    return Picture(
        _file_name(record, "curves"),
        f"NLL and accuracy on held-out images after every epoch; NLL at the end: {last}",
        f"Held-out images, {f'mean of {seeds} seeds' if seeds > 1 else 'one seed'}"
        f"{', the band is one standard deviation' if seeds > 1 else ''}. Scored is what a method has after "
        "an epoch: bbb its mean weights, sgld its latest sample, hwa its average once that has begun.",
        asdict(record),
        partial(curves_picture, record),
    )


def curves_picture(record: Record) -> Figure:
    """Plot NLL and accuracy on held-out data after every epoch: the mean over seeds with its spread."""
    figure, panels = axes_row(2, width=4.4, height=3.6)
    titles = {"validation_nll": "NLL: lower is better", "validation_accuracy": "accuracy"}
    for axes, (score, title) in zip(panels, titles.items(), strict=True):
        for row, colour in zip(record.curves, COLOURS, strict=False):
            values = np.array(record.curves[row][score])
            epochs, middle = np.arange(1, values.shape[1] + 1), values.mean(0)
            axes.plot(epochs, middle, color=colour, linewidth=1.8, label=row)
            if len(values) > 1:
                spread = values.std(0, ddof=1)
                axes.fill_between(
                    epochs, middle - spread, middle + spread, color=colour, alpha=0.18, linewidth=0
                )
        axes.set_title(title, color=INK, fontsize=11)
        axes.set_xlabel("epoch", color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _skip_the_start(axes, [np.array(scores[score]) for scores in record.curves.values()])
    panels[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=7, frameon=False
    )
    return figure


def _skip_the_start(axes: Axes, rows: Sequence[Array]) -> None:
    """Show the range of all but the first tenth: a bad start would flatten all the rest."""
    later = np.concatenate([row.mean(0)[row.shape[1] // 10 :] for row in rows])
    low, high = float(later.min()), float(later.max())
    margin = 0.08 * (high - low) or 0.01
    axes.set_ylim(low - margin, high + margin)


def _calibration(record: Record) -> Picture | None:
    if not record.calibration:
        return None
    gaps = ", ".join(
        f"{row} {figure.mean:.3f}"
        for row, scores in record.rows.items()
        if (figure := scores.get("ece_equal_mass")) is not None
    )
    return Picture(
        _file_name(record, "calibration"),
        f"Accuracy against confidence in 8 bins of equal count; mean distance from the diagonal: {gaps}",
        "Test images in 8 bins of equal count by confidence, as in the paper; mean over seeds. A point below "
        "the line is overconfident. Dashed: the last sample alone.",
        asdict(record),
        partial(calibration_picture, record),
    )


def calibration_picture(record: Record) -> Figure:
    """Plot accuracy against confidence, and their difference, in bins of equal count."""
    figure, (curve, gap) = axes_row(2, width=4.4, height=4.0)
    wholes = dict.fromkeys(row.removesuffix(_SINGLE) for row in record.calibration)
    colours = dict(zip(wholes, COLOURS, strict=False))
    lowest = 1.0
    for row, seeds in record.calibration.items():
        confidence, accuracy = _pooled(seeds)
        lowest = min(lowest, *confidence, *accuracy)
        single = row.endswith(_SINGLE)
        style: dict[str, Any] = {
            "color": colours[row.removesuffix(_SINGLE)],
            "linestyle": "--" if single else "-",
            "marker": "o",
            "markersize": 4,
            "markerfacecolor": "white" if single else None,
            "linewidth": 1.5,
        }
        curve.plot(confidence, accuracy, label=row, **style)
        gap.plot(confidence, accuracy - confidence, **style)
    curve.plot([lowest, 1], [lowest, 1], color=INK, linewidth=0.8, zorder=0)
    gap.axhline(0, color=INK, linewidth=0.8, zorder=0)
    curve.set_title("accuracy", color=INK, fontsize=11)
    gap.set_title("accuracy − confidence", color=INK, fontsize=11)
    for axes in (curve, gap):
        axes.set_xlabel("confidence", color=INK)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(
        *curve.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    return figure


def _pooled(seeds: Sequence[Bins]) -> tuple[Array, Array]:
    """Average each bin's confidence and accuracy over the seeds' examples, without empty bins."""
    counts = np.array([bins.count for bins in seeds])
    full = counts.sum(0) > 0
    confidence, accuracy = (
        (np.array(values) * counts).sum(0)[full] / counts.sum(0)[full]
        for values in ([b.confidence for b in seeds], [b.accuracy for b in seeds])
    )
    return confidence, accuracy


def _headline(record: Record) -> Picture:
    best = ", ".join(sorted(record.rows, key=lambda row: record.rows[row]["nll"].mean)[:3])
    return Picture(
        _file_name(record, "methods"),
        "Each method as a dot: NLL on test images against how well its uncertainty separates MNIST's images "
        f"and images of noise from them; lowest NLL: {best}",
        "Shaded: better than one network in both respects.",
        asdict(record),
        partial(headline_picture, record),
    )


_SINGLE = "-single"  # of a row that is the last sample of another one
_PICTURES: dict[str, Callable[[Record], Picture | None]] = {
    HEADLINE: _headline,
    "hwa/mnist-lenet5": _curves,
    "hwa/cifar10-vgg11": _curves,
    "atmc/cifar10-table1": _calibration,
}
