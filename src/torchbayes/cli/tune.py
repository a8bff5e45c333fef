"""`torchbayes tune`: search for a method's options on held-out training examples."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchbayes.cli import options as opt
from torchbayes.cli.output import answer, cell, notice, resumable, table

if TYPE_CHECKING:
    from torchbayes.experiments.settings import Experiment
    from torchbayes.tuning.search import Trial, Tuning

__all__ = ["held_out", "search", "tune"]

_SHOWN = 10


def tune(
    recipe: opt.Recipe = None,
    cpu: opt.Cpu = False,
    data: opt.Data = None,
    target: opt.Target = None,
    task: opt.Task = None,
    drop: opt.Drop = None,
    split: opt.TableSplit = None,
    test_share: opt.TestShare = None,
    model: opt.Model = None,
    method: Annotated[
        str | None,
        typer.Option(help="Method; `torchbayes methods` lists them.", show_default="map"),
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials; the first is the defaults.")] = 20,
    space: Annotated[
        list[str] | None,
        typer.Option(
            help="An option to search for: lr=0.001:0.1 for a range, rank=[5,10,20] for choices; repeatable.",
            show_default="lr around its default and prior=0.01:100",
        ),
    ] = None,
    epochs: opt.Epochs = None,
    batch_size: opt.BatchSize = None,
    samples: opt.Samples = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.", show_default="0")] = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Share of the training set to score on.", show_default="0.2"),
    ] = None,
    augment: opt.Augment = None,
    init: opt.Init = None,
    schedule: opt.ScheduleName = None,
    set_: opt.Set = None,
    model_set: opt.ModelSet = None,
    setting: opt.Settings = None,
    processes: Annotated[
        int, typer.Option(help="Processes that share the trials, one thread each if more than one.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the search.")] = Path("tuning"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out.")] = False,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Search for the options of a method with the best NLL on held-out training examples.

    Trials that fall behind end early. Stop with Ctrl-C at any time and continue with `--resume`. The result
    is OUT/recipe.toml, for `torchbayes train --recipe` and `compare --recipe`. The test set is not touched.

    Example: `torchbayes tune --data digits --method vogn --trials 20 --processes 2 --out tuning/vogn`
    """
    from torchbayes.experiments.settings import Experiment
    from torchbayes.experiments.tune_run import write_recipe

    flags: dict[str, Any] = {
        "data": data, "model": model, "method": method, "epochs": epochs, "batch_size": batch_size,
        "samples": samples, "seed": seed, "validation": validation, "augment": augment,
        "schedule": schedule, "init": init,
    }  # fmt: skip
    columns = {
        "target": target, "task": task, "drop": drop, "split": split, "test_share": test_share,
    }  # fmt: skip
    settings = opt.settings_from(recipe, cpu, model_set, setting, flags, columns)
    settings = {k: v for k, v in settings.items() if k not in ("methods", "rows")}
    name = settings.get("method", Experiment.method)
    pairs = opt.method_pairs(set_ or [], {name: name})[name]
    settings["options"] = {**settings.get("options", {}), **pairs}
    experiment = held_out(Experiment.from_settings(settings, "the settings"))
    if processes < 1:
        raise ValueError(f"processes is {processes}: expected a whole number of at least 1")
    tried = None if space is None else dict(opt.searched(pair) for pair in space)
    if worker or processes > 1:
        import torch

        torch.set_num_threads(1)
    with resumable(f"finished trials are kept in {out}"):
        with _workers(0 if worker else processes - 1) as started:
            found = search(
                experiment, out, trials, space=tried, resume=resume or worker, data_dir=data_dir,
                quiet=worker,
            )  # fmt: skip
        if worker:
            return
        if started:
            failed = [process.returncode for process in started if process.returncode]
            if failed:
                notice(
                    f"{len(failed)} of the processes failed: their trials are done again", as_json
                )
            # What the others have done last is not in the result yet, and what they left is done here.
            found = search(
                experiment, out, trials, space=tried, resume=True, data_dir=data_dir, quiet=True
            )
    if len(found.trials) < trials:
        raise ValueError(
            f"only {len(found.trials)} of {trials} trials have ended: start it again with --resume"
        )
    original = dataclasses.replace(experiment, validation=validation or 0.0)
    write_recipe(out / "recipe.toml", original, found)
    _show(out, found, as_json)


def held_out(experiment: Experiment) -> Experiment:
    """Return the settings of a search: with a validation split."""
    from torchbayes.experiments.tune_run import HELD_OUT

    return dataclasses.replace(experiment, validation=experiment.validation or HELD_OUT)


def search(
    experiment: Experiment, folder: Path, trials: int, *, space: Any = None, resume: bool = False,
    data_dir: Path | None = None, quiet: bool = False,
) -> Tuning:  # fmt: skip
    """Run a search under a progress display.

    Args:
        experiment: Settings, with a validation split.
        folder: Folder of the search.
        trials: Number of trials.
        space: What to try.
        resume: Go on with what the folder has.
        data_dir: Folder of the data.
        quiet: Whether to show nothing.
    """
    from torchbayes.cli.plan import PlanDisplay
    from torchbayes.experiments.tune_run import tune_experiment

    loaded = experiment.load_data(data_dir)
    if quiet:
        return tune_experiment(
            experiment, folder, data=loaded, trials=trials, space=space, resume=resume
        )
    if loaded.table is not None:
        notice(loaded.note, False)
    display = PlanDisplay([experiment.method] * trials)

    def after(trial: Trial) -> None:
        said = trial.state if trial.nll is None else f"NLL {trial.nll:.4f}"
        display.finished(
            min(trial.number, trials - 1), f"{_described(trial.options)}: {trial.why or said}"
        )

    with resumable(f"finished trials are kept in {folder}"), display.bars:
        return tune_experiment(
            experiment, folder, data=loaded, trials=trials, space=space, resume=resume,
            progress=lambda number: display.of(min(number, trials - 1)), after=after,
        )  # fmt: skip


@contextmanager
def _workers(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start further processes with the same command; they share the trials through the folder.

    After the block they have ended.
    """
    command = [sys.executable, "-m", "torchbayes", *sys.argv[1:], "--worker"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    started = [subprocess.Popen(command, env=env, stdin=quiet, stdout=quiet) for _ in range(count)]
    try:
        yield started
        for process in started:
            process.wait()
    finally:
        for process in started:
            process.terminate()
            process.wait()


def _described(options: dict[str, Any]) -> str:
    shown = (f"{name}={_value(value)}" for name, value in options.items())
    return ", ".join(shown) or "the defaults"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _show(out: Path, found: Tuning, as_json: bool) -> None:
    finished = [t for t in found.trials if t.nll is not None]
    best = sorted(finished, key=lambda t: (t.nll, t.number))[:_SHOWN]
    rows: Sequence[Sequence[str]] = [
        [str(t.number + 1), _described(t.options), cell(t.nll, ".4f")] for t in best
    ]
    shown = table(
        f"{found.method}: the best of {len(found.trials)} trials", ["trial", "options", "NLL"], rows
    )
    states = [t.state for t in found.trials]
    whole = {
        "method": found.method, "best": found.best, "nll": found.nll,
        "default_nll": found.default_nll, "trials": [dataclasses.asdict(t) for t in found.trials],
        "recipe": str(out / "recipe.toml"),
    }  # fmt: skip
    answer(
        whole, as_json, shown,
        f"{states.count('pruned')} ended early, {states.count('failed')} failed",
        f"next: torchbayes train --recipe {out / 'recipe.toml'}",
    )  # fmt: skip
