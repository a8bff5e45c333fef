"""`torchbayes continual`: tasks one after the other, against plain fine-tuning."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json, Seed, Set, method_pairs, numbers
from torchbayes.train.progress import Progress

if TYPE_CHECKING:
    from torchbayes.applications.continual import TaskScores

__all__ = ["continual"]

_FINE_TUNING = "mle"


class _Bars:
    """One bar for all tasks of all methods and one for the task in hand."""

    def __init__(self, runs: int) -> None:
        self.bars = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(bar_width=None),
            bars.TaskProgressColumn(),
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=5,
        )
        self.all = self.bars.add_task("all", total=runs, note=f"{runs} tasks to learn")
        self.one = self.bars.add_task("", total=1, note="", visible=False)


class _TaskBar(Progress):
    """Shows the training on one task."""

    def __init__(self, display: _Bars, before: int, title: str) -> None:
        self._display, self._before, self._title = display, before, title

    def start(self, name: str, total: int, done: int) -> None:
        self._total, self._done = max(1, total), done
        self._display.bars.reset(
            self._display.one, description=self._title, total=total, completed=done, visible=True
        )

    def advance(self, loss: float) -> None:
        self._done += 1
        shown = self._display.bars
        shown.update(self._display.one, completed=self._done, note=f"loss {loss:.4f}")
        shown.update(self._display.all, completed=self._before + self._done / self._total)


def continual(
    data: Annotated[str, typer.Option(help="Data set; `torchbayes data` lists them.")] = "mnist",
    tasks: Annotated[
        str, typer.Option(help="permuted (pixels in a random order) or split (classes in groups).")
    ] = "permuted",
    count: Annotated[int, typer.Option(help="Number of permuted tasks.")] = 10,
    per_task: Annotated[int, typer.Option(help="Classes in each split task.")] = 2,
    method: Annotated[
        str, typer.Option(help="Method that takes a prior: vogn, ivon, bbb, hwa or noisy-kfac.")
    ] = "vogn",
    epochs: Annotated[int, typer.Option(help="Passes through each task's training set.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Examples per update.")] = 256,
    hidden: Annotated[
        str, typer.Option(help="Comma-separated widths of the hidden layers.")
    ] = "100,100",
    samples: Annotated[int, typer.Option(help="Posterior draws to test with.")] = 10,
    seed: Seed = 0,
    set_: Set = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("continual"),
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Learn tasks one after the other, each posterior the next one's prior, and compare with fine-tuning.

    Writes continual.json and continual.md to --out after every task. Fine-tuning trains the same network by
    maximum likelihood, task after task. Methods have settings of their own for this; `--set` overrides them.
    """
    import torch

    from torchbayes.applications.continual import SETTINGS, can_remember, learn_tasks
    from torchbayes.applications.tasks import permuted_tasks, split_tasks
    from torchbayes.data import load_data
    from torchbayes.models import build_model
    from torchbayes.train.registry import METHODS
    from torchbayes.train.run_folder import RunFolder

    if tasks not in ("permuted", "split"):
        raise ValueError(f"tasks is {tasks!r}: expected permuted or split")
    if not can_remember(method):
        able = [name for name in METHODS if can_remember(name)]
        raise ValueError(f"method {method!r} takes no prior: choose one of {', '.join(able)}")
    widths = numbers(hidden, int, "hidden", "widths such as 100,100")
    given = method_pairs(set_ if set_ else [], {method: method})[method]
    settings: dict[str, dict[str, Any]] = {method: {**SETTINGS.get(method, {}), **given}}
    settings[_FINE_TUNING] = {}
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected a whole number of at least 1")
    loaded = load_data(data, data_dir=data_dir)
    by_pixels = tasks == "permuted"
    plan = permuted_tasks(loaded, count, seed) if by_pixels else split_tasks(loaded, per_task)
    RunFolder(out).prepare()
    about = {
        "data": data, "tasks": tasks, "hidden": widths, "epochs": epochs, "batch_size": batch_size,
        "samples": samples, "seed": seed, "command": shlex.join(["torchbayes", *sys.argv[1:]]),
    }  # fmt: skip
    results: dict[str, TaskScores] = {}
    display = _Bars(len(plan) * len(settings))
    with display.bars:
        for place, (name, options) in enumerate(settings.items()):
            torch.manual_seed(seed)
            model = build_model(
                "mlp", input_shape=loaded.shape, num_classes=loaded.num_classes, hidden=widths
            )

            def bar(number: int, name: str = name, place: int = place) -> Progress:
                title = f"{name}, task {number + 1}"
                return _TaskBar(display, place * len(plan) + number, title)

            def keep(scores: TaskScores, name: str = name) -> None:
                results[name] = scores
                _write(out, about, results, settings)

            learn_tasks(
                model, plan, name, epochs=epochs, batch_size=batch_size, samples=samples,
                seed=seed, progress=bar, after_task=keep, **options,
            )  # fmt: skip
    _show(out, results, as_json)


def _write(
    out: Path,
    about: dict[str, Any],
    results: dict[str, TaskScores],
    settings: dict[str, dict[str, Any]],
) -> None:
    from torchbayes.applications.continual import markdown_table
    from torchbayes.core.storage import write_text

    methods = {
        name: {
            "options": settings[name], "accuracy": scores.accuracy, "mean": scores.mean,
            "forgotten": scores.forgotten, "seconds": scores.seconds,
        }
        for name, scores in results.items()
    }  # fmt: skip
    names = next(iter(results.values())).tasks
    whole = {**about, "names": names, "methods": methods}
    write_text(out / "continual.json", json.dumps(whole, indent=2) + "\n")
    heading = f"Test accuracy in % after each task: {about['tasks']} {about['data']}\n\n"
    write_text(out / "continual.md", heading + markdown_table(results))


def _show(out: Path, results: dict[str, TaskScores], as_json: bool) -> None:
    if as_json:
        typer.echo((out / "continual.json").read_text(encoding="utf-8").strip())
        return
    names = next(iter(results.values())).tasks
    # A row for each task: ten columns would not fit on an ordinary terminal.
    table = Table(title="test accuracy at the end, %", title_justify="left")
    table.add_column("task", style="bold", no_wrap=True)
    columns = []
    for method, scores in results.items():
        title = "fine-tuning" if method == _FINE_TUNING else method
        table.add_column(title, justify="right", no_wrap=True)
        columns.append([*scores.accuracy[-1], scores.mean[-1], scores.forgotten])
    for name, *values in zip([*names, "mean", "forgotten"], *columns, strict=True):
        cells = [name, *(f"{100 * value:.1f}" for value in values)]
        table.add_row(*cells, end_section=name == names[-1])
    console = Console()
    console.print(table)
    console.print(f"after every task: {out / 'continual.md'}   results: {out / 'continual.json'}")
