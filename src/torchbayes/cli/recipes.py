"""`torchbayes recipes list | show | run | results`: the papers' experiments and what came of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from torchbayes.cli.compare import run_plan, show_results
from torchbayes.cli.options import DataDir, Json
from torchbayes.cli.prune import pruning_rows
from torchbayes.compare import Comparison, recipe_rows
from torchbayes.evidence import read_claims, read_records, record_of, results_page
from torchbayes.experiment import recipe_settings
from torchbayes.recipes import claims_file, find_recipe, recipe_names
from torchbayes.run import read_toml
from torchbayes.storage import write_text

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="The papers' experiments: list them, show one, run one and keep what it measured.",
)
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
    shown = Table(box=None, pad_edge=False)
    shown.add_column("name", style="bold", no_wrap=True)
    shown.add_column("title", overflow="fold")
    shown.add_column("from", overflow="fold")
    for row in rows:
        shown.add_row(*row.values())
    Console().print(shown)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe of `torchbayes recipes list`.")],
) -> None:
    """Show a recipe's settings, in full and CPU-sized, and the paper's figures."""
    text = find_recipe(name).read_text(encoding="utf-8")
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "toml", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="A recipe of `torchbayes recipes list`.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="Take the CPU-sized version.")] = False,
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
    out = Path("runs") / "recipes" / name if out is None else out
    base, rows = recipe_rows(settings)
    words = ["torchbayes recipes run", name, *(["--cpu"] if cpu else [])]
    command = " ".join([*words, *([f"--seeds {seeds}"] if seeds > 1 else [])])
    plan = Comparison(base, rows, range(base.seed, base.seed + seeds), out, data_dir, command)
    page = run_plan(plan)
    if plan.failed:
        first, why = next(iter(plan.failed.items()))
        raise ValueError(f"{first} failed, so nothing is recorded: {why}")
    measured = json.loads((out / "results.json").read_text(encoding="utf-8"))
    for step in about.get("after", []):
        _AFTER[step](measured, out, data_dir)
    size = "cpu" if cpu else "full"
    saved = record_of(name, about["title"], size, command, measured).save(results)
    show_results(out, page, as_json)
    if not as_json:
        Console().print(f"record: {saved}")


@app.command("results")
def results_(
    results: Results = Path("results"),
    page: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/results.md"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if the page is not up to date.")
    ] = False,
) -> None:
    """Write docs/results.md: each claim of the papers with our figure, and the records' tables."""
    if not results.is_dir():
        raise ValueError(
            f"{results} is no folder: give the one that torchbayes recipes run wrote to"
        )
    text = results_page(read_claims(claims_file()), read_records(results))
    if check:
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            raise ValueError(f"{page} is not what {results} gives: run torchbayes recipes results")
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, text)
    typer.echo(f"page: {page}")


def _prune(measured: dict[str, Any], out: Path, data_dir: Path | None) -> None:
    """Add the errors of the pruned posteriors to the scores of each run."""
    for row in measured["methods"].values():
        for scores in row["runs"]:
            for pruned in pruning_rows(out / scores["folder"], data_dir=data_dir):
                scores[f"pruned_{100 * pruned['fraction']:g}_error"] = pruned["error"]


_AFTER = {"prune": _prune}
