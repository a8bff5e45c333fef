"""Learn tasks in sequence and measure how much of each is remembered.

Variational continual learning (C. Nguyen et al., ICLR 2018) with any method here that takes a Gaussian
prior: the posterior q_t after task t is the prior of task t + 1, so that Bayes' rule itself determines which
weights may still change. VOGN does this in the experiments of Osawa et al., NeurIPS 2019, section 4.3 of
the long version. A method without such a prior is plain fine-tuning.

Deviation from the authors' experiment: a task starts from the last mean instead of fresh weights, which
needs far fewer epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchbayes import metrics
from torchbayes._version import __version__
from torchbayes.applications.tasks import Task
from torchbayes.core.digest import digest
from torchbayes.core.errors import RunError
from torchbayes.core.reading import read_json
from torchbayes.core.storage import remove_strays, write_json
from torchbayes.posterior import Point, Posterior, load, snapshot
from torchbayes.posterior.posterior import assign
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive
from torchbayes.prior import GaussianPrior
from torchbayes.train.fit import fit
from torchbayes.train.identity import likelihood_settings, network_checksum
from torchbayes.train.progress import Progress
from torchbayes.train.registry import check_options, find_method, method_options

__all__ = ["SETTINGS", "TaskScores", "can_remember", "learn_tasks", "markdown_table"]

# A prior that holds σ at 0.05 where the data are silent keeps the noise small enough to learn in a few
# epochs. τ below 1 helps too; with a much smaller one it would forget, because squared gradients of examples
# that are fitted without noise understate the curvature. No damping, which would count as evidence again in
# every task, and no warm-up of τ, which would weaken the prior while a task is new.
SETTINGS: dict[str, dict[str, Any]] = {
    "vogn": {
        "lr": 1e-3,
        "betas": (0.9, 0.01),
        "prior": 400.0,
        "damping": 0.0,
        "temperature": 0.3,
        "temperature_steps": 0,
    },
    "ivon": {"lr": 0.1, "prior": 400.0, "initial_curvature": 0.1, "temperature": 0.3},
    "bbb": {"lr": 1e-3, "prior": 400.0, "init_std": 0.02},
}
"""Options that suit sequences of tasks, by method; `learn_tasks` uses them only if they are passed."""


@dataclass
class TaskScores:
    """Test accuracies of every task after each task.

    Attributes:
        method: Name of the method.
        tasks: Names of the tasks.
        accuracy: Row t has the test accuracies of tasks 0 to t after task t.
        seconds: Training time of each task.
    """

    method: str
    tasks: list[str]
    accuracy: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def mean(self) -> list[float]:
        """Mean accuracy over the tasks seen so far, after each task."""
        return [sum(row) / len(row) for row in self.accuracy]

    @property
    def forgotten(self) -> float:
        """Average loss of accuracy of the tasks before the last since each was learned."""
        last = self.accuracy[-1]
        lost = [self.accuracy[t][t] - last[t] for t in range(len(last) - 1)]
        return sum(lost) / len(lost) if lost else 0.0


def can_remember(method: str) -> bool:
    """Whether a method's posterior can be its next prior: it is a Gaussian, and the method takes one.

    Example:
        >>> from torchbayes.applications.continual import can_remember
        >>> can_remember("vogn"), can_remember("map")
        (True, False)
    """
    found = find_method(method)
    return found.family == "a Gaussian" and "prior" in method_options(found)


def learn_tasks(
    model: nn.Module,
    tasks: Sequence[Task],
    method: str = "vogn",
    *,
    epochs: int = 10,
    batch_size: int = 256,
    samples: int = 10,
    seed: int = 0,
    progress: bool | Callable[[int], Progress] = False,
    after_task: Callable[[TaskScores], None] | None = None,
    folder: str | Path | None = None,
    **options: Any,
) -> TaskScores:
    """Train `model` on the tasks in turn and test it after each on all tasks seen so far.

    Args:
        model: Network; it has the last task's weights afterwards.
        tasks: Tasks.
        method: Name of a method. One that `can_remember` gets the last posterior as its prior; any other is
            fine-tuned.
        epochs: Passes through each task's training set.
        batch_size: Examples per update.
        samples: Posterior draws to test with.
        seed: Random seed.
        progress: Whether to show a bar for every task, or a function that returns the display of a task.
        after_task: Called with the scores so far after every task.
        folder: Keep what the last task ended with here; a folder that has it is continued, bit-equal, if it
            began with the same tasks, settings and weights of the model.
        **options: Options of the method.

    Example:
        >>> import torchbayes as tb
        >>> from torchbayes.applications.continual import learn_tasks
        >>> from torchbayes.applications.tasks import permuted_tasks
        >>> from torchbayes.data import load_data
        >>> tasks = permuted_tasks(load_data("digits"), 2)
        >>> scores = learn_tasks(tb.models.mlp(64, hidden=(20,)), tasks, "vogn", epochs=1, lr=1e-3)
        >>> [len(row) for row in scores.accuracy]
        [1, 2]
    """
    if not tasks:
        raise ValueError("there are no tasks: give at least one")
    check_options(find_method(method), options)
    remembers = can_remember(method)
    scores = TaskScores(method, [task.name for task in tasks])
    kept: _Kept | None = None
    if folder is not None:
        settings = {
            "method": method, "tasks": scores.tasks, "epochs": epochs, "batch_size": batch_size,
            "samples": samples, "seed": seed, "options": {k: repr(v) for k, v in options.items()},
            "torchbayes": __version__, **_digests(model, tasks),
        }  # fmt: skip
        kept = _Kept(Path(folder), settings)
        posterior = kept.restore(model, scores)
        if posterior is not None:
            if remembers:
                options["prior"] = GaussianPrior.from_posterior(posterior)
            if after_task is not None:
                after_task(scores)
    for number, task in list(enumerate(tasks))[len(scores.accuracy) :]:
        started = time.monotonic()
        run = fit(
            model, (task.train.inputs, task.train.targets), method,
            epochs=epochs, batch_size=batch_size, likelihood=task.likelihood, in_place=True,
            transform=task.transform, seed=seed + number,
            progress=progress if isinstance(progress, bool) else progress(number), **options,
        )  # fmt: skip
        scores.seconds.append(time.monotonic() - started)
        if remembers:
            options["prior"] = GaussianPrior.from_posterior(run.posterior)
            # An averaged posterior's mean is not the weights that training ended with.
            assign(model, run.posterior.mean())
        seen = tasks[: number + 1]
        scores.accuracy.append([_accuracy(model, run.posterior, t, samples, seed) for t in seen])
        if kept is not None:
            kept.keep(model, run.posterior, scores)
        if after_task is not None:
            after_task(scores)
    return scores


# What is compared as a digest, in words.
_DIGESTS = {
    "task_checksums": "of other data",
    "start_checksum": "that began with another network or other weights",
}


def _digests(model: nn.Module, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return what tasks.json holds of the data and of the network before the first task."""
    # Permuted tasks are of the same examples.
    splits = {id(split): split for task in tasks for split in (task.train, task.test)}
    found = {key: split.digest() for key, split in splits.items()}
    checksums = [
        digest(found[id(t.train)], found[id(t.test)], t.order, likelihood_settings(t.likelihood))
        for t in tasks
    ]
    start = digest(network_checksum(model), snapshot(model))
    return {"task_checksums": checksums, "start_checksum": start}


class _Kept:
    """What the last finished task ended with, on disk: its posterior, the weights, and the scores so far.

    tasks.json is written last and names the files of its task, so that a kill leaves this task or the one
    before it.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self.file = folder / "tasks.json"

    def _paths(self, count: int) -> tuple[Path, Path]:
        stem = f"task-{count:03d}"
        return self.folder / f"{stem}-posterior.safetensors", self.folder / f"{stem}.safetensors"

    def keep(self, model: nn.Module, posterior: Posterior, scores: TaskScores) -> None:
        count = len(scores.accuracy)
        of_posterior, of_weights = self._paths(count)
        posterior.save(of_posterior)
        Point(snapshot(model), model_name=type(model).__name__).save(of_weights)
        found = {"accuracy": scores.accuracy, "seconds": scores.seconds}
        write_json(self.file, {**self.settings, **found})
        for old in self._paths(count - 1):
            old.unlink(missing_ok=True)

    def _checked(self, there: Any) -> tuple[list[list[float]], list[float]]:
        """Return accuracies and times of the finished tasks, if they are that."""
        rows, seconds = there.get("accuracy"), there.get("seconds")
        fine = (
            isinstance(rows, list) and isinstance(seconds, list) and len(seconds) == len(rows) > 0
        )
        if fine:
            fine = all(isinstance(row, list) and len(row) == t + 1 for t, row in enumerate(rows))
        if not fine or any(type(x) not in (int, float) for some in [*rows, seconds] for x in some):
            raise RunError(
                f"{self.file} is damaged, it has no accuracies and times of tasks: remove the folder to "
                "learn the tasks again"
            )
        return rows, seconds

    def restore(self, model: nn.Module, scores: TaskScores) -> Posterior | None:
        """Give model and scores the state after the last finished task; return its posterior.

        What a kill has left of other tasks is removed.
        """
        remove_strays(self.folder)
        if not self.file.exists():
            return None
        there = read_json(self.file, "remove the folder to learn the tasks again")
        for key, value in self.settings.items():
            if key in _DIGESTS and key not in there:
                continue  # an older version did not write it down
            if there.get(key) != value:
                if key in _DIGESTS:
                    raise RunError(
                        f"{self.folder} holds tasks {_DIGESTS[key]}: continue them with their own or choose "
                        "another folder"
                    )
                raise RunError(
                    f"{self.folder} holds tasks with {key} = {there.get(key)!r}, not {value!r}: continue "
                    "them with their own settings or choose another folder"
                )
        scores.accuracy, scores.seconds = self._checked(there)
        of_posterior, of_weights = self._paths(len(scores.accuracy))
        assign(model, load(of_weights, model).mean())
        posterior = load(of_posterior, model)
        for old in self.folder.glob("task-*.safetensors"):
            if old not in (of_posterior, of_weights):
                old.unlink(missing_ok=True)
        return posterior


def _accuracy(model: nn.Module, posterior: Posterior, task: Task, samples: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    inputs = task.transform(task.test.inputs)
    result = predictive(
        model, posterior, inputs, samples, task.likelihood, generator, recalibrate=False
    )
    assert isinstance(result, ClassPredictive)
    return metrics.accuracy(result.probs, task.test.targets)


def markdown_table(results: Mapping[str, TaskScores]) -> str:
    """Format the accuracies after every task as a Markdown table."""
    names = next(iter(results.values())).tasks
    lines = [
        "| after | method | " + " | ".join(names) + " | mean |",
        "| --- | --- |" + " ---: |" * (len(names) + 1),
    ]
    for t, name in enumerate(names):
        for method, scores in results.items():
            if t < len(scores.accuracy):
                row = [f"{100 * a:.1f}" for a in scores.accuracy[t]]
                row += [""] * (len(names) - len(row)) + [f"**{100 * scores.mean[t]:.1f}**"]
                lines.append(f"| {name} | {method} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"
