"""`torchbayes recipes list | show | run`: list, show, run and record the papers' experiments."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from torchbayes.cli.options import DataDir, Json
from torchbayes.cli.output import answer, visible

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="List, show and run the papers' experiments, and record their results.",
)
Cpu = Annotated[bool, typer.Option("--cpu", help="Use the CPU-sized version.")]
Name = Annotated[str, typer.Argument(help="A recipe of `torchbayes recipes list`.")]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the recipes."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from torchbayes.core.reading import read_toml
    from torchbayes.experiments.recipes import find_recipe, recipe_names

    rows = []
    for name in recipe_names():
        table = read_toml(find_recipe(name))
        rows.append(
            {"name": name, "title": str(table.get("title", "")), "from": table.get("paper", "")}
        )
    if as_json:
        typer.echo(json.dumps(rows))
        return
    console = Console()
    # Two lines each: beside the long names, a column of titles would have room for only a word or two.
    for row in rows:
        console.print(
            Text.assemble((visible(row["name"]), "bold"), "  ", (visible(row["from"]), "dim"))
        )
        console.print(Padding(Text(visible(row["title"])), (0, 0, 0, 2)))


@app.command()
def show(name: Name, cpu: Cpu = False) -> None:
    """Show a recipe: its settings, in full and CPU-sized, and the paper's figures.

    With --cpu, show only the settings that a run with --cpu would use.
    """
    import tomli_w
    from rich.console import Console
    from rich.syntax import Syntax

    from torchbayes.core.reading import read_text, read_toml
    from torchbayes.experiments.recipes import find_recipe, recipe_settings

    file = find_recipe(name)
    text = visible(read_text(file, "check the file"))
    if cpu:
        more = {key: read_toml(file).get(key) for key in ("after", "continual")}
        settings = recipe_settings(file, cpu=True) | {k: v for k, v in more.items() if v}
        text = tomli_w.dumps(settings)
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "toml", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)


@app.command()
def run(
    name: Name,
    cpu: Cpu = False,
    seeds: Annotated[int, typer.Option(help="Number of seeds to run every row with.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs; runs/recipes/NAME/full, or …/cpu, if not given."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder for the record.")] = Path("results"),
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run a recipe and record its results in results/NAME.json.

    After Ctrl-C, the same command resumes where it stopped.
    """
    from rich.console import Console
    from rich.markdown import Markdown

    from torchbayes.core.reading import read_toml
    from torchbayes.experiments.recipes import find_recipe, recipe_settings
    from torchbayes.experiments.record import record_of
    from torchbayes.experiments.record_table import record_table

    file = find_recipe(name)
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: expected at least 1")
    settings, about = recipe_settings(file, cpu=cpu), read_toml(file)
    words = ["torchbayes recipes run", name, *(["--cpu"] if cpu else [])]
    command = " ".join([*words, *([f"--seeds {seeds}"] if seeds > 1 else [])])
    size = "cpu" if cpu else "full"
    out = Path("runs") / "recipes" / name / size if out is None else out
    if "continual" in about:
        measured = _learn_tasks(settings, about["continual"], seeds, out, data_dir)
    else:
        measured = _compare(settings, about.get("after", []), seeds, out, data_dir, command)
    record = record_of(name, str(about.get("title", name)), size, command, measured, out)
    saved = record.save(results)
    if as_json:
        typer.echo(saved.read_text(encoding="utf-8"), nl=False)
        return
    Console().print(Markdown(visible(record_table(record))))
    answer(None, False, f"record: {saved}   runs: {out}")


def _compare(
    settings: dict[str, Any],
    after: list[str],
    seeds: int,
    out: Path,
    data_dir: Path | None,
    command: str,
) -> dict[str, Any]:
    """Train and score every row, then run the steps that the recipe lists under `after`."""
    from torchbayes.cli.compare import run_plan
    from torchbayes.core.reading import read_json
    from torchbayes.experiments.compare import Comparison, recipe_rows

    base, rows = recipe_rows(settings)
    plan = Comparison(base, rows, range(base.seed, base.seed + seeds), out, data_dir, command)
    run_plan(plan)
    if plan.failed:
        first, why = next(iter(plan.failed.items()))
        raise ValueError(f"{first} failed, so nothing is recorded: {why}")
    measured: dict[str, Any] = read_json(out / "results.json", "run the recipe again")
    for row in measured["methods"].values():
        for scores in row["runs"]:
            for step in after:
                scores |= _AFTER[step](out / scores["folder"], data_dir)
    return measured


def _pruned(run: Path, data_dir: Path | None) -> dict[str, float]:
    """Measure the error with increasing shares of the weights removed."""
    from torchbayes.experiments.prune_run import pruning_rows

    rows = pruning_rows(run, data_dir=data_dir)
    return {f"pruned_{100 * row['fraction']:g}_error": row["error"] for row in rows}


# How the draws of each strategy of the hypernetwork are averaged (section 3.4 of its paper), and how many.
# Sixteen times the channels are 256 times the work, so widening ends at four.
_OWN_AVERAGE = {
    "block-wise": ("parallelizing", (1, 4, 16)),
    "layer-wise": ("widening", (1, 4)),
}


def _averaged(run: Path, data_dir: Path | None) -> dict[str, float]:
    """Measure error, NLL and ECE of 1, 4 and 16 averaged draws, and how often four are wrong together."""
    from torchbayes.train.run_folder import RunFolder

    strategy = RunFolder(run).read_config()["options"].get("strategy")
    how, counts = _OWN_AVERAGE.get(strategy, ("branching", (1, 4, 16)))
    found = _average_once(run, how, counts, data_dir)
    # Faults in common are counted over whole networks, whatever is averaged.
    whole = found if how == "branching" else _average_once(run, "branching", (4,), data_dir)
    scores: dict[str, float] = {}
    for row in found["rows"]:
        for name in ("error", "nll", "ece"):
            scores[f"x{row['times']}_{name}"] = row[name]
    if "quadruple_faults" in whole:
        scores["quadruple_faults"] = whole["quadruple_faults"][4]
    for name, value in found.get("correlations", {}).items():
        if isinstance(value, float):
            scores[f"correlation_{name}"] = value
    return scores


def _average_once(
    run: Path, how: str, counts: tuple[int, ...], data_dir: Path | None
) -> dict[str, Any]:
    """Average a run's draws, or read the result from its folder if it exists."""
    from torchbayes.experiments.average_run import averaged, averaged_with
    from torchbayes.experiments.made_with import read_result
    from torchbayes.train.run_folder import RunFolder

    made = averaged_with(RunFolder(run), counts)
    found = read_result(run / f"average-{how}.json", made)
    return averaged(run, how, counts, data_dir=data_dir) if found is None else found


_AFTER = {"prune": _pruned, "average": _averaged}


def _learn_tasks(
    settings: dict[str, Any],
    tasks: dict[str, Any],
    seeds: int,
    out: Path,
    data_dir: Path | None,
) -> dict[str, Any]:
    """Learn a sequence of tasks with every seed; scores are those after the last task."""
    from torchbayes.cli.continual import continual
    from torchbayes.core.reading import read_json
    from torchbayes.experiments.compare import recipe_rows

    base, _ = recipe_rows(settings)
    methods: dict[str, Any] = {}
    numbers = range(base.seed, base.seed + seeds)
    for seed in numbers:
        folder = out / f"{base.method}-{seed}"
        continual(
            data=base.data,
            method=base.method,
            epochs=base.epochs,
            batch_size=base.batch_size,
            samples=base.samples,
            hidden=",".join(map(str, base.model_options["hidden"])),
            seed=seed,
            out=folder,
            resume=True,
            data_dir=data_dir,
            **tasks,
        )
        found = read_json(folder / "continual.json", "run the recipe again")["methods"]
        for name, scores in found.items():
            row = methods.setdefault(
                "fine-tuning" if name == "mle" else name,
                {"settings": {"options": scores["options"]}, "runs": []},
            )
            row["runs"].append(
                {
                    "seed": seed,
                    "accuracy": scores["mean"][-1],
                    "forgotten": scores["forgotten"],
                    "seconds": float(sum(scores["seconds"])),
                }
            )
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    shared = dataclasses.asdict(base) | tasks | {"seeds": list(numbers)}
    return {"created": created, "settings": shared, "methods": methods}
