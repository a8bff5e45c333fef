"""`torchbayes diagnose`: whether a sampler's chains have met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json

__all__ = ["diagnose"]

_ONE_CHAIN = (
    "R-hat needs at least 2 chains and this run has 1: train with --set chains=4, or under torchrun"
)


def diagnose(
    run: Annotated[Path, typer.Argument(help="Run folder of a sampler.")],
    inputs: Annotated[
        int, typer.Option(help="Number of test inputs whose predictions are examined.")
    ] = 200,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show whether a sampler's chains agree, how many draws they are worth, and how they moved.

    *R-hat* near 1 means that the chains agree (above 1.01 they do not yet); it is computed from
    predictions, because weights mislead. The *effective sample size* says how many independent draws the
    chains are worth. The *kinetic temperature* is 1 for a sampler whose noise is right.

    Writes diagnosis.json and traces.png to the run folder.
    """
    from torchbayes.experiments.diagnose_run import diagnosis_of

    found = diagnosis_of(run, inputs, data_dir)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    table = Table(
        title=f"{run}: {found['chains']} chains of {found['draws']} draws", title_justify="left"
    )
    for column in ("of", "R-hat median", "R-hat worst", "ESS median", "ESS least"):
        table.add_column(column, justify="left" if column == "of" else "right")
    for name in ("predictions", "log_posterior"):
        row = found[name]
        table.add_row(
            name.replace("_", "-"),
            *(_shown(row[key], 3) for key in ("rhat_median", "rhat_worst")),
            *(_shown(row[key], 1) for key in ("ess_median", "ess_least")),
        )
    console.print(table)
    if found["chains"] < 2:
        console.print(_ONE_CHAIN, soft_wrap=True)
    if found["layers"]:
        layers = Table(title="second half of the chains, by layer", title_justify="left")
        columns = list(next(iter(found["layers"].values())))
        for column in ("layer", *(c.replace("_", " ") for c in columns)):
            layers.add_column(column, justify="left" if column == "layer" else "right")
        for layer, values in found["layers"].items():
            layers.add_row(layer or "(the network)", *(f"{values[c]:.4g}" for c in columns))
        console.print(layers)
        console.print(f"traces: {run / 'traces.png'}")
    else:
        console.print("this run has no traces: it was trained before they were kept")


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
