"""Several methods on the same data, network and budget: train, evaluate, tabulate.

    OUT/results.json        the table, with every run behind it
    OUT/report.html         the page
    OUT/runs/METHOD-SEED/   the run folders

A plan can be stopped and resumed: finished runs are kept, the one that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from torchbayes._version import __version__
from torchbayes.data import DataSet, OutOfDistribution, Split, ood_for
from torchbayes.experiment import Experiment, TrainedRun
from torchbayes.methods import METHODS
from torchbayes.nonfinite import TrainingError
from torchbayes.progress import Progress
from torchbayes.run import RunFolder
from torchbayes.storage import atomic_path, write_text

__all__ = ["Comparison", "Job"]

_SHOWN_IMAGES = 2000


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    experiment: Experiment
    folder: Path

    @property
    def scores(self) -> dict[str, Any] | None:
        """The scores, if the run is finished and evaluated."""
        file = self.folder / "scores.json"
        if not file.exists():
            return None
        scores: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return scores


class Comparison:
    """A plan of methods × seeds.

    Args:
        base: The settings that all runs share.
        methods: The methods' names.
        seeds: One run of every method for each.
        options: Options of single methods, by the method's name.
        out: Where everything goes.
        data_dir: Where the data is, if not in the usual place.
        command: The command that repeats the comparison, for the page.
    """

    def __init__(
        self,
        base: Experiment,
        methods: Sequence[str],
        seeds: Sequence[int],
        options: Mapping[str, Mapping[str, Any]],
        out: Path,
        data_dir: Path | None = None,
        command: str | None = None,
    ) -> None:
        self.base, self.out, self.data_dir, self.command = base, out, data_dir, command
        self.jobs = [
            Job(
                dataclasses.replace(
                    base,
                    method=method,
                    seed=seed,
                    options={**base.options, **options.get(method, {})},
                ).check(),
                out / "runs" / f"{method}-{seed}",
            )
            for method in methods
            for seed in seeds
        ]
        self.failed: dict[str, str] = {}

    def run(
        self,
        progress: Callable[[int, Job], Progress],
        finished: Callable[[Job, dict[str, Any]], None],
    ) -> Path:
        """Do what is not done yet and write results.json; a run that fails does not stop the others.

        Args:
            progress: Gives the progress display of the run with that number.
            finished: Called with every run's scores.

        Returns:
            The path of results.json.
        """
        RunFolder(self.out).prepare()
        data = self.base.load_data(self.data_dir)
        ood = ood_for(data, self.data_dir)
        self._save_images(data, ood)
        for number, job in enumerate(self.jobs):
            scores = job.scores
            if scores is None:
                try:
                    job.experiment.train(
                        job.folder, data=data, resume=True, progress=progress(number, job)
                    )
                    scores = TrainedRun(job.folder, self.data_dir).evaluate(ood=ood)
                except (TrainingError, ValueError) as error:
                    self.failed[job.experiment.method] = str(error)
                    self._write(data, ood)
                    continue
            finished(job, scores)
            self._write(data, ood)
        return self.out / "results.json"

    def _write(self, data: DataSet, ood: OutOfDistribution) -> None:
        methods: dict[str, Any] = {}
        for job in self.jobs:
            scores = job.scores
            if scores is not None:
                runs = methods.setdefault(job.experiment.method, [])
                folder = job.folder.relative_to(self.out).as_posix()
                runs.append({"seed": job.experiment.seed, "folder": folder, **scores})
        shared = dataclasses.asdict(self.base)
        shared.pop("method")
        if self.command is not None:
            shared["command"] = self.command
        results = {
            "torchbayes": __version__,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "data": data.name,
            "model": self.base.network,
            "classes": list(data.classes),
            "ood": ood.name,
            "notes": [note for note in (data.note, f"Out of distribution: {ood.note}.") if note],
            "settings": shared | {"seeds": sorted({job.experiment.seed for job in self.jobs})},
            "methods": {name: _summary(name, runs) for name, runs in methods.items()},
            "failed": self.failed,
        }
        write_text(self.out / "results.json", json.dumps(results, indent=2) + "\n")

    def _save_images(self, data: DataSet, ood: OutOfDistribution) -> None:
        if len(data.shape) != 3 or not isinstance(data.test, Split):
            return
        with atomic_path(self.out / "images.npz") as temporary, temporary.open("wb") as file:
            np.savez_compressed(
                file,
                test=data.test.inputs[:_SHOWN_IMAGES].numpy(),
                ood=ood.inputs[:_SHOWN_IMAGES].numpy(),
            )


def _summary(method: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds of every score."""
    names = [key for key in runs[0] if key not in ("seed", "folder")]
    means: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    for name in names:
        values = [run[name] for run in runs if run.get(name) is not None]
        means[name] = statistics.fmean(values) if len(values) == len(runs) else None
        spread[name] = statistics.stdev(values) if len(values) == len(runs) > 1 else None
    about = {"summary": METHODS[method].summary, "paper": METHODS[method].paper}
    finite = {k: v for k, v in means.items() if v is None or math.isfinite(v)}
    return {**about, **finite, "spread": spread, "runs": runs}
