"""Results of a recipe and everything needed to repeat it: one small JSON file per recipe."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchbayes import metrics
from torchbayes._version import __version__
from torchbayes.core.storage import write_text
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.train.run_folder import RunFolder

__all__ = ["Bins", "Figure", "Record", "provenance", "read_records", "record_of"]

_CURVES = ("validation_nll", "validation_accuracy")
_BINS = 8  # as in the ATMC paper's calibration plots


@dataclass(frozen=True)
class Figure:
    """One score of one row.

    Attributes:
        mean: Mean over the seeds.
        spread: Standard deviation over the seeds; `None` for a single seed.
        values: One value per seed.
    """

    mean: float
    spread: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Compute mean and spread of some values."""
        spread = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), spread, tuple(values))


@dataclass(frozen=True)
class Bins:
    """One run's test predictions in bins of equal count, from the least confident to the most.

    Attributes:
        confidence: Mean confidence in each bin, 0 in an empty one.
        accuracy: Accuracy in each bin, 0 in an empty one.
        count: Number of examples in each bin.
    """

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    count: tuple[int, ...]

    @classmethod
    def of(cls, predictions: Predictions) -> Bins:
        """Sort predictions into bins."""
        curve = metrics.reliability_curve(
            predictions.probs, predictions.targets, _BINS, equal_mass=True
        )
        confidence, accuracy = (
            tuple(round(value, 5) for value in values.nan_to_num(nan=0.0).tolist())
            for values in (curve.confidence, curve.accuracy)
        )
        return cls(confidence, accuracy, tuple(curve.count.tolist()))


@dataclass(frozen=True)
class Record:
    """The measured scores of a recipe.

    Attributes:
        recipe: The recipe's name, `paper/name`.
        title: The recipe's title.
        size: `"cpu"` or `"full"`.
        command: The command that repeats it.
        commit: The commit of the code, with a plus sign if files were changed; empty outside a checkout.
        versions: Versions of torchbayes, torch and Python.
        machine: Processor and number of cores.
        finished: When the last run finished, in UTC.
        seconds: Training time of all runs together.
        seeds: The seeds.
        settings: The settings that all rows share.
        own: The settings in which each row differs.
        rows: The scores by row and name.
        curves: By row and name, the score of each seed after every epoch; only for runs with validation
            data.
        calibration: By row, each seed's calibration bins; only for classifiers.
    """

    recipe: str
    title: str
    size: str
    command: str
    commit: str
    versions: dict[str, str]
    machine: dict[str, Any]
    finished: str
    seconds: float
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    own: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Figure]]
    curves: dict[str, dict[str, tuple[tuple[float, ...], ...]]] = field(default_factory=dict)
    calibration: dict[str, tuple[Bins, ...]] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write the record to `folder/paper/name.json`."""
        file = folder / f"{self.recipe}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        return file

    @classmethod
    def load(cls, file: Path) -> Record:
        """Read a record."""
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
            rows = {
                row: {
                    name: Figure(f["mean"], f["spread"], tuple(f["values"]))
                    for name, f in scores.items()
                }
                for row, scores in table.pop("rows").items()
            }
            curves = {
                row: {name: tuple(map(tuple, seeds)) for name, seeds in scores.items()}
                for row, scores in table.pop("curves", {}).items()
            }
            calibration = {
                row: tuple(Bins(**{name: tuple(v) for name, v in bins.items()}) for bins in seeds)
                for row, seeds in table.pop("calibration", {}).items()
            }
            seeds = tuple(table.pop("seeds"))
            return cls(**table, seeds=seeds, rows=rows, curves=curves, calibration=calibration)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is not a record of a recipe ({error}): write it again with torchbayes recipes run"
            ) from error


def record_of(
    recipe: str,
    title: str,
    size: str,
    command: str,
    results: Mapping[str, Any],
    out: Path | None = None,
) -> Record:
    """Make the record of a finished comparison.

    Args:
        recipe: The recipe's name.
        title: The recipe's title.
        size: `"cpu"` or `"full"`.
        command: The command that repeats it.
        results: Content of the comparison's results.json.
        out: Folder of the comparison, for the curves and the calibration of its runs.
    """
    rows: dict[str, dict[str, Figure]] = {}
    curves: dict[str, dict[str, tuple[tuple[float, ...], ...]]] = {}
    calibration: dict[str, tuple[Bins, ...]] = {}
    seconds = 0.0
    for row, summary in results["methods"].items():
        runs = [_with_error(run) for run in summary["runs"]]
        names = [k for k, v in runs[0].items() if isinstance(v, float) and k != "seed"]
        rows[row] = {
            name: Figure.of([run[name] for run in runs])
            for name in names
            if all(run.get(name) is not None for run in runs)
        }
        seconds += sum(run.get("seconds") or 0.0 for run in runs)
        folders = [] if out is None else [out / run["folder"] for run in runs if "folder" in run]
        if found := _curves(folders):
            curves[row] = found
        files = [folder / "predictions.npz" for folder in folders]
        if files and all(file.is_file() for file in files):
            calibration[row] = tuple(Bins.of(Predictions.load(file)) for file in files)
    shared = {k: v for k, v in results["settings"].items() if k not in ("command", "seeds", "seed")}
    return Record(
        recipe, title, size, command, **provenance(), finished=results["created"],
        seconds=round(seconds, 1), seeds=tuple(results["settings"]["seeds"]), settings=shared,
        own={row: summary.get("settings", {}) for row, summary in results["methods"].items()},
        rows=rows, curves=curves, calibration=calibration,
    )  # fmt: skip


def _curves(folders: Sequence[Path]) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Collect the scores after every epoch that all runs, one per seed, have."""
    histories = [RunFolder(folder).read_metrics() for folder in folders]
    found = {}
    for name in _CURVES:
        if histories and all(rows and all(name in row for row in rows) for rows in histories):
            found[name] = tuple(tuple(round(row[name], 5) for row in rows) for rows in histories)
    return found


def provenance() -> dict[str, Any]:
    """Say what a figure was measured with: `commit`, `versions` and `machine`."""
    return {
        "commit": _commit(),
        "versions": {
            "torchbayes": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": _processor(), "cores": os.cpu_count()},
    }


def _with_error(run: Mapping[str, Any]) -> dict[str, Any]:
    """Add the error, which papers report as often as the accuracy."""
    accuracy = run.get("accuracy")
    return dict(run) if accuracy is None else {**run, "error": 1 - accuracy}


def read_records(folder: Path) -> dict[str, Record]:
    """Read all records below a folder, by recipe."""
    records = (Record.load(file) for file in sorted(folder.glob("*/*.json")))
    return {record.recipe: record for record in records}


def _commit() -> str:
    """Look up the checkout's commit; an installed package has none."""
    here = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
    except OSError:  # no git
        return ""
    return f"{commit}+" if commit and changed else commit


def _processor() -> str:
    """Look up the processor's name, where the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
