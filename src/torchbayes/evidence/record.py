"""What a run of a recipe measured, with all that is needed to repeat it: one small JSON file a recipe."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchbayes._version import __version__
from torchbayes.storage import write_text

__all__ = ["Figure", "Record", "provenance", "read_records", "record_of"]


@dataclass(frozen=True)
class Figure:
    """One score of one row.

    Attributes:
        mean: The mean over the seeds.
        spread: The standard deviation over the seeds; none for a single one.
        values: Each seed's.
    """

    mean: float
    spread: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Mean and spread of some values."""
        spread = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), spread, tuple(values))


@dataclass(frozen=True)
class Record:
    """The measured scores of a recipe.

    Attributes:
        recipe: The recipe's name, `paper/name`.
        title: The recipe's title.
        size: `"cpu"` or `"full"`.
        command: The command that repeats it.
        commit: The commit of the code, with a plus sign if files were changed; empty outside a checkout.
        versions: Of torchbayes, torch and Python.
        machine: What it ran on.
        finished: When, in UTC.
        seconds: The training time of all runs together.
        seeds: The seeds.
        settings: Every setting that the rows share.
        own: The settings in which each row differs.
        rows: The scores by row and name.
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
            return cls(**{**table, "rows": rows, "seeds": tuple(table["seeds"])})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is not a record of a recipe ({error}): make it anew with torchbayes recipes run"
            ) from error


def record_of(
    recipe: str, title: str, size: str, command: str, results: Mapping[str, Any]
) -> Record:
    """The record of a finished comparison.

    Args:
        recipe: The recipe's name.
        title: Its title.
        size: `"cpu"` or `"full"`.
        command: What repeats it.
        results: The comparison's results.json.
    """
    rows: dict[str, dict[str, Figure]] = {}
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
    shared = {k: v for k, v in results["settings"].items() if k not in ("command", "seeds", "seed")}
    return Record(
        recipe=recipe,
        title=title,
        size=size,
        command=command,
        **provenance(),
        finished=results["created"],
        seconds=round(seconds, 1),
        seeds=tuple(results["settings"]["seeds"]),
        settings=shared,
        own={row: summary.get("settings", {}) for row, summary in results["methods"].items()},
        rows=rows,
    )


def provenance() -> dict[str, Any]:
    """What a figure was measured with: `commit`, `versions` and `machine`."""
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
    """The scores with the error, which the papers of the field report as often as the accuracy."""
    accuracy = run.get("accuracy")
    return dict(run) if accuracy is None else {**run, "error": 1 - accuracy}


def read_records(folder: Path) -> dict[str, Record]:
    """All records below a folder, by recipe."""
    records = (Record.load(file) for file in sorted(folder.glob("*/*.json")))
    return {record.recipe: record for record in records}


def _commit() -> str:
    """The checkout's commit; an installed package has none."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
    except OSError:  # no git
        return ""
    return f"{commit}+" if commit and changed else commit


def _processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
