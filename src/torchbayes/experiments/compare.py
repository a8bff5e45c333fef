"""Train, evaluate and tabulate several methods on the same data.

    OUT/results.json        the table, with all its runs
    OUT/report.html         the report
    OUT/table.md, table.tex the table, to paste into a README or a paper
    OUT/runs/ROW-SEED/      the run folders

A row of the table is a method with the shared settings, or with settings of its own.

A plan can be stopped and resumed: finished runs are kept, the interrupted one continues.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from torchbayes._version import __version__
from torchbayes.core.device import process_device
from torchbayes.core.errors import RunError
from torchbayes.core.reading import is_number
from torchbayes.core.storage import atomic_path, write_json
from torchbayes.data import DataSet, OutOfDistribution, Split, ood_for
from torchbayes.experiments.calibrate import calibrate
from torchbayes.experiments.evaluation import evaluate
from torchbayes.experiments.made_with import (
    check_run,
    check_version,
    made_with,
    read_result,
    scored_on,
)
from torchbayes.experiments.provenance import commit
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment
from torchbayes.train.failures import TrainingError
from torchbayes.train.progress import Progress
from torchbayes.train.registry import METHODS
from torchbayes.train.run_folder import RunFolder

__all__ = ["Comparison", "Job", "Row", "check_name", "recipe_rows", "rows_from"]

_LOG = logging.getLogger("torchbayes")
_SHOWN_IMAGES = 2000
_ROW = "row:"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: Name in the table.
        experiment: Settings; the seed is replaced by each run's own.
        last_of: Name of another row: score the last sample of that row's runs alone, without training.
    """

    name: str
    experiment: Experiment
    last_of: str | None = None


def rows_from(
    tables: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    flags: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
) -> list[Row]:
    """Build the rows of a recipe's [rows] table.

    Args:
        tables: By row name, settings that differ from the shared ones, or `last_of` alone.
        settings: Shared settings.
        flags: Settings from the command line, which apply to every row.
        options: Method options from the command line, by row name.

    Example:
        >>> tables = {"sampler": {"method": "sgld"}, "one": {"last_of": "sampler"}}
        >>> [(row.name, row.experiment.method, row.last_of) for row in rows_from(tables, {}, {}, {})]
        [('sampler', 'sgld', None), ('one', 'sgld', 'sampler')]
    """
    rows: dict[str, Row] = {}
    for name, table in _tables(tables, "rows").items():
        if "last_of" in table:
            whole = rows.get(table["last_of"])
            if whole is None or whole.last_of is not None or len(table) > 1:
                raise ValueError(
                    f"row {name!r} has {dict(table)}: last_of stands alone and names a row above with a run "
                    "of its own"
                )
            rows[name] = Row(name, whole.experiment, whole.name)
            continue
        for key in ("data", "table", "examples", "validation", "seed"):
            if key in table:
                raise ValueError(
                    f"row {name!r} sets {key}, which all rows of a comparison share: set it above the rows"
                )
        own = {**settings, **table, **flags}
        own["options"] = {**own.get("options", {}), **options.get(name, {})}
        experiment = Experiment.from_settings(own, f"row {name!r}")
        start = _row_of(experiment.init)
        if start is not None and (start not in rows or rows[start].last_of is not None):
            raise ValueError(
                f"row {name!r} has init {experiment.init!r}: after {_ROW!r} name a row above with a run "
                "of its own, and keep it if you choose rows with --methods"
            )
        rows[name] = Row(name, experiment)
    return list(rows.values())


def _row_of(init: str | tuple[str, ...]) -> str | None:
    """Return the row whose runs, each with the same seed, others start from; None for files."""
    return init.removeprefix(_ROW) if isinstance(init, str) and init.startswith(_ROW) else None


def _tables(tables: Any, what: str) -> Mapping[str, Mapping[str, Any]]:
    """Return a table of tables, or raise a `ValueError`."""
    if not isinstance(tables, Mapping):
        raise ValueError(f"{what} is {tables!r}: expected a table, such as [{what}.NAME]")
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"{what}.{name} is {table!r}: expected a table of settings")
    return tables


def recipe_rows(settings: Mapping[str, Any]) -> tuple[Experiment, list[Row]]:
    """Return the shared settings and the rows of a recipe.

    Args:
        settings: Result of `recipe_settings`. Rows are its [rows], else its [methods], else its one method.
    """
    shared = {key: value for key, value in settings.items() if key not in ("methods", "rows")}
    one = {shared.get("method", Experiment.method): shared.get("options", {})}
    methods: Mapping[str, Any] = settings.get("methods", one)
    named = _tables(methods, "methods").items()
    lines = {name: {"method": name, "options": table} for name, table in named}
    rows = rows_from(settings.get("rows", lines), shared, {}, {})
    first = rows[0].experiment.method
    base = Experiment.from_settings({**shared, "method": first, "options": {}}, "the recipe")
    return base, rows


@dataclass(frozen=True)
class Job:
    """One run of a comparison, or the last sample of one.

    Attributes:
        row: Row of the table.
        experiment: Settings, with the seed of this run.
        folder: Folder of the scores.
        data: What it is scored on, the data and the out-of-distribution inputs, as soon as they are read.
    """

    row: Row
    experiment: Experiment
    folder: Path
    data: tuple[DataSet, OutOfDistribution] | None = None

    @property
    def run_folder(self) -> Path:
        """Folder of the run; for a last sample, that of the whole run."""
        return self.folder if self.row.last_of is None else self.folder.parent

    @property
    def scores(self) -> dict[str, Any] | None:
        """Scores, or None until the run is finished and evaluated with these settings."""
        found = self._result("scores.json", last=self.row.last_of is not None, ood=True)
        if found is not None and not all(v is None or is_number(v) for v in found.values()):
            _LOG.warning("%s is damaged: it is made again", self.folder / "scores.json")
            return None
        return found

    @property
    def calibrated(self) -> bool:
        """Whether the run has been calibrated with these settings."""
        return self._result("calibration.json", last=False) is not None

    @property
    def corrupted(self) -> bool:
        """Whether the run has been scored on corrupted images with these settings."""
        last = self.row.last_of is not None
        return self._result("corruptions.json", last=last, ood=True) is not None

    def _result(self, name: str, *, last: bool, ood: bool = False) -> dict[str, Any] | None:
        run = RunFolder(self.run_folder)
        if self.data is None or not run.config_file.exists():
            return None
        data, other = self.data
        on = scored_on(data, other if ood else None)
        made = made_with(run, samples=self.experiment.samples, last=last, **on)
        return read_result(self.folder / name, made)


class Comparison:
    """A plan of rows × seeds.

    Args:
        base: Settings that all runs share.
        rows: Rows to compare.
        seeds: Seeds; every row is run with each.
        out: Output folder.
        data_dir: Folder of the data, if not the usual one.
        command: Command that repeats the comparison, for the report.
        corruptions: Also score every run on corrupted test images.
        device: Device to compute on; the machine's accelerator, if it has one, or else the CPU if None.
    """

    def __init__(
        self,
        base: Experiment,
        rows: Sequence[Row],
        seeds: Sequence[int],
        out: Path,
        data_dir: Path | None = None,
        command: str | None = None,
        corruptions: bool = False,
        device: str | None = None,
    ) -> None:
        self.base, self.out, self.data_dir, self.command = base, out, data_dir, command
        self.corruptions, self.device = corruptions, process_device(device)
        for row in rows:
            check_name(row.name)
        self.jobs = [
            Job(
                row,
                _seeded(row.experiment, seed, out),
                out
                / "runs"
                / (f"{row.last_of}-{seed}/last" if row.last_of else f"{row.name}-{seed}"),
            )
            for row in rows
            for seed in seeds
        ]
        self.failed: dict[str, str] = {}

    def run(
        self,
        progress: Callable[[int], Progress],
        finished: Callable[[int, dict[str, Any]], None],
    ) -> None:
        """Complete the plan and write results.json; a run that fails does not stop the others.

        Args:
            progress: Returns the progress display of the job with that number.
            finished: Called with the number of each finished job and its scores.
        """
        with RunFolder(self.out).locked():
            self._run(progress, finished)

    def _run(
        self,
        progress: Callable[[int], Progress],
        finished: Callable[[int, dict[str, Any]], None],
    ) -> None:
        # Loaded once: only which examples a run trains on depends on its seed.
        whole = self.base.load_whole(self.data_dir)
        self._check_finished(whole)
        ood = ood_for(whole, self.data_dir)
        self.jobs = [dataclasses.replace(job, data=(whole, ood)) for job in self.jobs]
        self._save_images(whole, ood)
        for number, job in enumerate(self.jobs):
            scores = job.scores
            if scores is None or self._lacks(job):
                try:
                    if job.row.last_of is None:
                        self._train(job, whole, progress(number))
                    scores = self._score(job, whole, ood)
                except (TrainingError, ValueError, TypeError, RuntimeError, MemoryError) as error:
                    if isinstance(error, RunError) and isinstance(error.__cause__, OSError):
                        raise  # no room for a run's folder, say: that is no failure of the method
                    self.failed[job.row.name] = str(error) or type(error).__name__
                    self._write(whole, ood)
                    continue
            finished(number, scores)
            self._write(whole, ood)

    def _check_finished(self, whole: DataSet) -> None:
        """Raise a `RunError` if an existing run has other settings, or other data, than its job."""
        commits: set[str] = set()
        for job in self.jobs:
            there = RunFolder(job.run_folder)
            there.check_not_lost()
            if there.config_file.exists() or (job.folder / "scores.json").exists():
                check_run(there, job.experiment, whole)
                check_version(there)
                commits.add(str(there.read_config().get("commit", "")))
        if others := sorted(commits - {"", commit()}):
            _LOG.warning(
                "%s has runs of commit %s, this is %s: their figures are kept; choose another folder to have "
                "all of this code",
                self.out, ", ".join(others), commit() or "an installed torchbayes",
            )  # fmt: skip

    def _train(self, job: Job, whole: DataSet, progress: Progress) -> None:
        data = job.experiment.split(whole)
        train_experiment(
            job.experiment,
            job.folder,
            data=data,
            resume=True,
            device=self.device,
            progress=progress,
        )

    def _score(self, job: Job, whole: DataSet, ood: OutOfDistribution) -> dict[str, Any]:
        data, last = job.experiment.split(whole), job.row.last_of is not None
        run = TrainedRun(
            job.run_folder, self.data_dir, experiment=job.experiment, data=data, device=self.device
        )
        scores = job.scores
        if scores is None or self._lacks_corruptions(job):
            # A table is encoded by its training rows, so that inputs of another split would not fit.
            inputs = ood if data.table is None else None
            scores = evaluate(run, ood=inputs, last=last, corruptions=self.corruptions)
        if not last:
            calibrate(run)
        return scores

    def _lacks(self, job: Job) -> bool:
        """Whether a kill came between the scores and what belongs to them."""
        calibrates = job.row.last_of is None
        return self._lacks_corruptions(job) or (calibrates and not job.calibrated)

    def _lacks_corruptions(self, job: Job) -> bool:
        return self.corruptions and not job.corrupted

    def _write(self, data: DataSet, ood: OutOfDistribution) -> None:
        methods: dict[str, Any] = {}
        for job in self.jobs:
            if (scores := job.scores) is not None:
                folder = job.folder.relative_to(self.out).as_posix()
                found = {"seed": job.experiment.seed, "folder": folder, **scores}
                methods.setdefault(job.row.name, []).append(found)
        shared = {key: value for key, value in self.base.settings().items() if key != "method"}
        if self.command is not None:
            shared["command"] = self.command
        notes = [data.note, f"Out of distribution: {ood.note}."]
        if self.base.table.get("split") == "seed":
            notes.insert(1, "Every seed has a split of its own; the first one's is described here.")
        results = {
            "torchbayes": __version__,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "data": data.name,
            "model": self.base.network,
            "classes": list(data.classes),
            "ood": ood.name,
            "notes": [note for note in notes if note],
            "settings": shared | {"seeds": sorted({job.experiment.seed for job in self.jobs})},
            "methods": {name: self._summary(name, runs) for name, runs in methods.items()},
            "failed": self.failed,
        }
        write_json(self.out / "results.json", results)

    def _summary(self, name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
        row = next(job.row for job in self.jobs if job.row.name == name)
        method = METHODS[row.experiment.method]
        shared, own = self.base.settings(), row.experiment.settings()
        last = f"the last sample of {row.last_of} alone"
        return {
            "summary": method.summary if row.last_of is None else last,
            "paper": method.paper,
            "posterior": method.posterior_kind if row.last_of is None else "Point",
            "settings": {key: value for key, value in own.items() if value != shared.get(key)},
            **_statistics(runs),
        }

    def _save_images(self, data: DataSet, ood: OutOfDistribution) -> None:
        if len(data.shape) != 3 or not isinstance(data.test, Split):
            return
        with atomic_path(self.out / "images.npz") as temporary, temporary.open("wb") as file:
            np.savez_compressed(
                file,
                test=data.test.inputs[:_SHOWN_IMAGES].numpy(),
                ood=ood.inputs[:_SHOWN_IMAGES].numpy(),
            )


def _seeded(experiment: Experiment, seed: int, out: Path) -> Experiment:
    """Return the settings of one run, which starts from another row's run with the same seed if so asked."""
    start = _row_of(experiment.init)
    init = experiment.init
    if start is not None:
        init = RunFolder(out / "runs" / f"{start}-{seed}").posterior_file.as_posix()
    return dataclasses.replace(experiment, seed=seed, init=init)


def check_name(name: str) -> None:
    """Raise a `ValueError` if a row's name cannot be the name of a folder inside the comparison's."""
    fine = name.isprintable() and name.strip() == name and 0 < len(os.fsencode(name)) <= 120
    if not fine or name.startswith(".") or set(name) & set('/\\:*?"<>|'):
        raise ValueError(
            f"the row's name {name!r} cannot name a folder: use letters, digits, spaces, - and _"
        )


def _statistics(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute mean and spread over seeds of every score."""
    means: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    for name in (key for key in runs[0] if key not in ("seed", "folder")):
        values = [run[name] for run in runs if run.get(name) is not None]
        means[name] = statistics.fmean(values) if len(values) == len(runs) else None
        spread[name] = statistics.stdev(values) if len(values) == len(runs) > 1 else None
    finite = {k: v for k, v in means.items() if v is None or math.isfinite(v)}
    return {**finite, "spread": spread, "runs": runs}
