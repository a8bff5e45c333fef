"""Results of a recipe and everything needed to repeat it: one small JSON file per recipe."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchbayes import metrics
from torchbayes.core.reading import read_json
from torchbayes.core.storage import remove_strays, write_text
from torchbayes.experiments.provenance import provenance
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.train.run_folder import RunFolder

__all__ = ["Bins", "Figure", "Record", "read_records", "record_of"]

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
        commit: The commit of the code, with a plus sign if files were changed; empty outside a checkout,
            several if the runs were made in sessions with different code.
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
        remove_strays(file.parent)
        write_text(file, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        return file

    @classmethod
    def load(cls, file: Path) -> Record:
        """Read a record."""
        try:
            table = read_json(file, "write it again with torchbayes recipes run")
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
        except (KeyError, TypeError, AttributeError) as error:
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
    commits: set[str] = set()
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
        commits |= set(map(_commit_of, folders))
        if found := _curves(folders):
            curves[row] = found
        files = [folder / "predictions.npz" for folder in folders]
        if files and all(file.is_file() for file in files):
            calibration[row] = tuple(Bins.of(Predictions.load(file)) for file in files)
    shared = {k: v for k, v in results["settings"].items() if k not in ("command", "seeds", "seed")}
    about = provenance()
    if any(commits):
        # Runs of an earlier session may have been made by other code than this.
        about["commit"] = " ".join(sorted(filter(None, commits)))
    return Record(
        recipe, title, size, command, **about, finished=results["created"],
        seconds=round(seconds, 1), seeds=tuple(results["settings"]["seeds"]), settings=shared,
        own={row: summary.get("settings", {}) for row, summary in results["methods"].items()},
        rows=rows, curves=curves, calibration=calibration,
    )  # fmt: skip


def _commit_of(folder: Path) -> str:
    """Return the commit that made the run of these scores; those of a last sample are in a subfolder."""
    for run in (RunFolder(folder), RunFolder(folder.parent)):
        if run.config_file.exists():
            return str(run.read_config().get("commit", ""))
    return ""


def _curves(folders: Sequence[Path]) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Collect the scores after every epoch that all runs, one per seed, have."""
    histories = [RunFolder(folder).read_metrics() for folder in folders]
    found = {}
    for name in _CURVES:
        if histories and all(rows and all(name in row for row in rows) for rows in histories):
            found[name] = tuple(tuple(round(row[name], 5) for row in rows) for rows in histories)
    return found


def _with_error(run: Mapping[str, Any]) -> dict[str, Any]:
    """Add the error, which papers report as often as the accuracy."""
    accuracy = run.get("accuracy")
    return dict(run) if accuracy is None else {**run, "error": 1 - accuracy}


def read_records(folder: Path) -> dict[str, Record]:
    """Read all records below a folder, by recipe."""
    records = (Record.load(file) for file in sorted(folder.glob("*/*.json")))
    return {record.recipe: record for record in records}
