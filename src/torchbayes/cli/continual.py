"""`torchbayes continual`: learn a sequence of tasks, against plain fine-tuning."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchbayes.cli.options import DataDir, Json, Seed, Set, method_pairs, numbers
from torchbayes.cli.output import answer, resumable, table

if TYPE_CHECKING:
    from torchbayes.applications.continual import TaskScores
    from torchbayes.train.progress import Progress

__all__ = ["continual"]

_FINE_TUNING = "mle"


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
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after the last task that --out has.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Learn tasks in sequence, each posterior the prior of the next task, and compare with fine-tuning.

    Writes continual.json and continual.md to --out after every task, where `--resume` continues.
    Fine-tuning trains the same network by maximum likelihood, task after task.
    Some methods have special settings; `--set` overrides them.
    """
    import torch

    from torchbayes.applications.continual import SETTINGS, can_remember, learn_tasks
    from torchbayes.applications.tasks import permuted_tasks, split_tasks
    from torchbayes.cli.plan import PlanDisplay
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
    if (out / "continual.json").exists() and not resume:
        raise ValueError(f"{out} already holds results: add --resume or choose another folder")
    about = {
        "data": data, "tasks": tasks, "hidden": widths, "epochs": epochs, "batch_size": batch_size,
        "samples": samples, "seed": seed, "command": shlex.join(["torchbayes", *sys.argv[1:]]),
    }  # fmt: skip
    results: dict[str, TaskScores] = {}
    display = PlanDisplay([name for name in settings for _ in plan])
    kept = resumable(f"finished tasks are kept in {out}")
    with kept, RunFolder(out).locked(), display.bars:
        for first, (name, options) in zip(
            range(0, 2 * len(plan), len(plan)), settings.items(), strict=True
        ):
            torch.manual_seed(seed)
            model = build_model(
                "mlp", input_shape=loaded.shape, num_classes=loaded.num_classes, hidden=widths
            )

            def keep(scores: TaskScores, name: str = name, first: int = first) -> None:
                results[name] = scores
                _write(out, about, results, settings)
                learned = len(scores.accuracy)
                mean = f"task {learned}: mean accuracy {scores.mean[-1]:.2%} on the tasks so far"
                display.finished(first + learned - 1, mean)

            def shown(number: int, first: int = first) -> Progress:
                return display.of(first + number)

            learn_tasks(
                model, plan, name, epochs=epochs, batch_size=batch_size, samples=samples, seed=seed,
                progress=shown, after_task=keep, folder=out / "tasks" / name,
                **options,
            )  # fmt: skip
    _show(out, results, as_json)


def _write(
    out: Path,
    about: dict[str, Any],
    results: dict[str, TaskScores],
    settings: dict[str, dict[str, Any]],
) -> None:
    from torchbayes.applications.continual import markdown_table
    from torchbayes.core.storage import write_json, write_text

    methods = {
        name: {
            "options": settings[name], "accuracy": scores.accuracy, "mean": scores.mean,
            "forgotten": scores.forgotten, "seconds": scores.seconds,
        }
        for name, scores in results.items()
    }  # fmt: skip
    names = next(iter(results.values())).tasks
    write_json(out / "continual.json", {**about, "names": names, "methods": methods})
    heading = f"Test accuracy in % after each task: {about['tasks']} {about['data']}\n\n"
    write_text(out / "continual.md", heading + markdown_table(results))


def _show(out: Path, results: dict[str, TaskScores], as_json: bool) -> None:
    from torchbayes.core.reading import read_json

    names = next(iter(results.values())).tasks
    # A row for each task: ten columns would not fit on an ordinary terminal.
    columns = [[*s.accuracy[-1], s.mean[-1], s.forgotten] for s in results.values()]
    shown = table(
        "final test accuracy, %",
        ["task", *("fine-tuning" if name == _FINE_TUNING else name for name in results)],
        (
            [name, *(f"{100 * value:.1f}" for value in values)]
            for name, *values in zip([*names, "mean", "forgotten"], *columns, strict=True)
        ),
    )
    shown.rows[len(names) - 1].end_section = True
    where = f"after every task: {out / 'continual.md'}   results: {out / 'continual.json'}"
    whole = read_json(out / "continual.json", "run it again") if as_json else None
    answer(whole, as_json, shown, where)
