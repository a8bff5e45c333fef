"""`torchbayes recipes list | show | run | results`: the papers' experiments and what came of them."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from torchbayes.cli.average import averaged
from torchbayes.cli.compare import run_plan
from torchbayes.cli.continual import continual
from torchbayes.cli.options import DataDir, Json
from torchbayes.cli.prune import pruning_rows
from torchbayes.core.storage import write_text
from torchbayes.evidence import (
    filled_in,
    read_claims,
    read_records,
    record_of,
    record_table,
    results_page,
)
from torchbayes.evidence.pictures import pictures_of
from torchbayes.experiments.compare import Comparison, recipe_rows
from torchbayes.experiments.recipes import (
    claims_file,
    find_recipe,
    recipe_names,
    recipe_settings,
)
from torchbayes.train.run_folder import RunFolder, read_toml

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="The papers' experiments: list them, show one, run one and keep what it measured.",
)
Cpu = Annotated[bool, typer.Option("--cpu", help="Take the CPU-sized version.")]
Results = Annotated[Path, typer.Option(help="The folder of the records.")]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the recipes."""
    rows = []
    for name in recipe_names():
        table = read_toml(find_recipe(name))
        rows.append({"name": name, "title": table["title"], "from": table.get("paper", "")})
    if as_json:
        typer.echo(json.dumps(rows))
        return
    console = Console()
    # Two lines each: names are long, and in columns a title would have room for a word or two.
    for row in rows:
        console.print(Text.assemble((row["name"], "bold"), "  ", (row["from"], "dim")))
        console.print(Padding(Text(row["title"]), (0, 0, 0, 2)))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe of `torchbayes recipes list`.")],
    cpu: Cpu = False,
) -> None:
    """Show a recipe: its settings, in full and CPU-sized, and the paper's figures.

    With --cpu, only the settings that a run with --cpu has.
    """
    file = find_recipe(name)
    text = file.read_text(encoding="utf-8")
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
    name: Annotated[str, typer.Argument(help="A recipe of `torchbayes recipes list`.")],
    cpu: Cpu = False,
    seeds: Annotated[int, typer.Option(help="Runs of every row, with different seeds.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; runs/recipes/NAME if not given.")
    ] = None,
    results: Results = Path("results"),
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run a recipe and record what it measured in results/NAME.json.

    Stopped with Ctrl-C, the same command goes on where it was.
    """
    file = find_recipe(name)
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: expected at least 1")
    settings, about = recipe_settings(file, cpu=cpu), read_toml(file)
    words = ["torchbayes recipes run", name, *(["--cpu"] if cpu else [])]
    command = " ".join([*words, *([f"--seeds {seeds}"] if seeds > 1 else [])])
    out = Path("runs") / "recipes" / name if out is None else out
    if "continual" in about:
        measured = _learn_tasks(settings, about["continual"], seeds, out, data_dir)
    else:
        measured = _compare(settings, about.get("after", []), seeds, out, data_dir, command)
    record = record_of(name, about["title"], "cpu" if cpu else "full", command, measured, out)
    saved = record.save(results)
    if as_json:
        typer.echo(saved.read_text(encoding="utf-8"), nl=False)
        return
    Console().print(Markdown(record_table(record)))
    Console().print(f"record: {saved}   runs: {out}")


def _compare(
    settings: dict[str, Any],
    after: list[str],
    seeds: int,
    out: Path,
    data_dir: Path | None,
    command: str,
) -> dict[str, Any]:
    """Train and score every row, then do what the recipe asks for with the finished runs."""
    base, rows = recipe_rows(settings)
    plan = Comparison(base, rows, range(base.seed, base.seed + seeds), out, data_dir, command)
    run_plan(plan)
    if plan.failed:
        first, why = next(iter(plan.failed.items()))
        raise ValueError(f"{first} failed, so nothing is recorded: {why}")
    measured: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    for row in measured["methods"].values():
        for scores in row["runs"]:
            for step in after:
                scores |= _AFTER[step](out / scores["folder"], data_dir)
    return measured


def _pruned(run: Path, data_dir: Path | None) -> dict[str, float]:
    """The error of the posterior with more and more weights removed."""
    rows = pruning_rows(run, data_dir=data_dir)
    return {f"pruned_{100 * row['fraction']:g}_error": row["error"] for row in rows}


# How draws of each of the hypernetwork's strategies are averaged (section 3.4 of its paper), and how many.
# Sixteen times the channels are 256 times the work, so widening ends at four.
_OWN_AVERAGE = {
    "block-wise": ("parallelizing", (1, 4, 16)),
    "layer-wise": ("widening", (1, 4)),
}


def _averaged(run: Path, data_dir: Path | None) -> dict[str, float]:
    """Error, NLL and ECE of 1, 4 and 16 draws averaged, and how four of them err together."""
    strategy = RunFolder(run).read_config()["options"].get("strategy")
    how, counts = _OWN_AVERAGE.get(strategy, ("branching", (1, 4, 16)))
    found = _average_once(run, how, counts, data_dir)
    # Whether networks err together is a matter of whole networks, whatever is averaged.
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
    """The averages of a run, from its folder if they are there."""
    file = run / f"average-{how}.json"
    if file.exists():
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return kept
    return averaged(run, how, counts, data_dir=data_dir)


_AFTER = {"prune": _pruned, "average": _averaged}


def _learn_tasks(
    settings: dict[str, Any],
    tasks: dict[str, Any],
    seeds: int,
    out: Path,
    data_dir: Path | None,
) -> dict[str, Any]:
    """Learn a sequence of tasks with every seed; the scores are those after the last task."""
    base, _ = recipe_rows(settings)
    methods: dict[str, Any] = {}
    numbers = range(base.seed, base.seed + seeds)
    for seed in numbers:
        folder = out / f"{base.method}-{seed}"
        file = folder / "continual.json"
        if not file.exists() or not _all_tasks(file):
            continual(
                data=base.data,
                method=base.method,
                epochs=base.epochs,
                batch_size=base.batch_size,
                samples=base.samples,
                hidden=",".join(map(str, base.model_options["hidden"])),
                seed=seed,
                out=folder,
                data_dir=data_dir,
                **tasks,
            )
        found = json.loads(file.read_text(encoding="utf-8"))["methods"]
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


def _all_tasks(file: Path) -> bool:
    """Whether all methods have learned all tasks."""
    found = json.loads(file.read_text(encoding="utf-8"))
    counts = {len(scores["mean"]) for scores in found["methods"].values()}
    return counts == {len(found["names"])} and len(found["methods"]) > 1


@app.command("results")
def results_(
    results: Results = Path("results"),
    page: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/results.md"),
    readme: Annotated[
        Path, typer.Option(help="A text with places for tables, such as <!-- headline -->.")
    ] = Path("README.md"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a file is not up to date.")
    ] = False,
) -> None:
    """Write docs/results.md: each claim of the papers with our figure, and the records' tables.

    Pictures of the records go to images/results beside it. The README's tables are made anew too.
    """
    if not results.is_dir():
        raise ValueError(
            f"{results} is no folder: give the one that torchbayes recipes run wrote to"
        )
    claims, records = read_claims(claims_file()), read_records(results)
    texts = {page: results_page(claims, records)}
    if readme.is_file():
        texts[readme] = filled_in(readme.read_text(encoding="utf-8"), claims, records)
    pictures = [picture for found in pictures_of(records).values() for picture in found]
    folder = page.parent / "images" / "results"
    if check:
        # The bytes of a picture depend on the machine's fonts; the record that it shows does not.
        wrong = [folder / picture.name for picture in pictures if not picture.is_in(folder)]
        for file, text in texts.items():
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                wrong.insert(0, file)
        if wrong:
            raise ValueError(
                f"{wrong[0]} is not what {results} gives: run torchbayes recipes results"
            )
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_text(file, text)
    for picture in pictures:
        picture.save(folder)
    typer.echo(f"page: {page}")
