"""`torchbayes average`: what averaging several draws of a run's weights is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json, Seed, numbers

__all__ = ["average"]


def average(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    how: Annotated[str, typer.Option(help="branching, parallelizing or widening.")] = "branching",
    times: Annotated[
        str, typer.Option(help="Comma-separated numbers of draws to average.")
    ] = "1,4,16",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results of all runs.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Average draws of the weights and score them on the test set, batch norm re-estimated for each.

    *branching* averages the outputs of N networks, *parallelizing* those of N copies of every residual
    block; *widening* has N times the channels in every block. A run with fewer members, such as an
    ensemble of four or a single network, is averaged as far as it goes.

    Writes average-HOW.json to every run folder, with how often four networks err together (quadruple
    faults) and how weights correlate within and between blocks, and weights.png if the posterior is random.

    Example: `torchbayes average comparison/runs/* --times 1,4,16 --out average.json`
    """
    counts = sorted(set(numbers(times, int, "times", "whole numbers such as 1,4,16")))
    if counts[0] < 1:
        raise ValueError(f"times is {times!r}: expected whole numbers such as 1,4,16")
    from torchbayes.core.storage import write_text
    from torchbayes.experiments.average_run import averaged

    results = [averaged(run, how, counts, seed, data_dir) for run in runs]
    if out is not None:
        write_text(out, json.dumps(results, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(results))
        return
    _show(results, how)


def _show(results: list[dict[str, Any]], how: str) -> None:
    table = Table(title=f"{how}: medians over groups of draws", title_justify="left")
    for column in ("run", "×", "error", "NLL", "ECE", "error ¹", "NLL ¹", "ECE ¹"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for result in results:
        for row in result["rows"]:
            table.add_row(
                result["run"],
                str(row["times"]),
                *(
                    f"{row[prefix + name]:{form}}"
                    for prefix in ("", "probabilities_")
                    for name, form in (("error", ".2%"), ("nll", ".4f"), ("ece", ".4f"))
                ),
            )
    console = Console()
    console.print(table)
    console.print("¹ probabilities averaged instead of logits")
    shapes = Table(
        title="misclassified by 0 … 4 of four networks; correlations of weights in and between blocks",
        title_justify="left",
    )
    for column in ("run", "0", "1", "2", "3", "4", "|r| within", "between"):
        shapes.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for result in results:
        faults = [f"{count:.0f}" for count in result.get("quadruple_faults", [])]
        r = result.get("correlations", {})
        both = [r.get("within"), r.get("between")]
        shown = ["–" if value is None else f"{value:.3f}" for value in both]
        if faults or r:
            shapes.add_row(result["run"], *(faults if faults else ["–"] * 5), *shown)
    if shapes.row_count:
        console.print(shapes)
