"""`torchbayes prune`: how many weights a posterior can do without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json, RunSamples, numbers

__all__ = ["prune"]


def prune(
    run: Annotated[Path, typer.Argument(help="Run folder with a Gaussian posterior.")],
    fractions: Annotated[
        str, typer.Option(help="Comma-separated shares of the weights to remove.")
    ] = "0.0,0.5,0.75,0.95,0.98",
    save: Annotated[
        float, typer.Option(help="Share at which the pruned posterior is saved.")
    ] = 0.75,
    samples: RunSamples = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Remove the weights with the least |mean|/std and show the cost on the test set.

    Writes prune.json, pictures/prune.png and pruned.safetensors to the run folder; `torchbayes report`
    puts the picture on its page.
    """
    from torchbayes.experiments.prune_run import pruning_rows

    shares = numbers(fractions, float, "fractions", "shares such as 0,0.5,0.75")
    rows = pruning_rows(run, shares, save, samples, data_dir)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(title=f"{run}: test error of what is left", title_justify="left")
    for column in ("removed", "error", "NLL", "weights left"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['fraction']:.0%}", f"{row['error']:.2%}", f"{row['nll']:.4f}", f"{row['left']:,}"
        )
    console = Console()
    console.print(table)
    console.print(
        f"picture: {run / 'pictures' / 'prune.png'}   {save:.0%} pruned: {run / 'pruned.safetensors'}"
    )
