"""`torchbayes calibrate`: temperature, prediction sets and abstention of a finished run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json, RunFolder, RunSamples, numbers

__all__ = ["calibrate"]


def calibrate(
    run: RunFolder,
    coverages: Annotated[
        str,
        typer.Option(
            help="How often a prediction set shall contain the true class, comma-separated."
        ),
    ] = "0.8,0.9,0.95",
    risks: Annotated[
        str, typer.Option(help="The share of answers that may be wrong, comma-separated.")
    ] = "0.01,0.02,0.05",
    samples: RunSamples = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Fit a temperature, prediction sets and abstention to a finished run, so that they keep their word.

    Fits on the run's validation split, or on half of its test split if it has none (and scores on the
    other half). Writes calibration.json to the run folder.
    """
    from torchbayes.experiments import calibrate as calibrating
    from torchbayes.experiments.trained_run import TrainedRun

    expected = "shares such as 0.8,0.9"
    result = calibrating.calibrate(
        TrainedRun(run, data_dir),
        coverages=numbers(coverages, float, "coverages", expected),
        risks=numbers(risks, float, "risks", expected),
        samples=samples,
    )
    if as_json:
        typer.echo(json.dumps(result))
        return
    console = Console()
    console.print(
        f"fitted on {result['fitted_on']} ({result['fitted']:,} examples), "
        f"scored on {result['scored_on']} ({result['scored']:,})"
    )
    for table in _tables(result):
        console.print(table)


def _tables(result: dict[str, Any]) -> list[Table]:
    scale = result["temperature"]
    first = Table(title=f"temperature {scale['value']:.3f}", title_justify="left")
    for column in ("", "accuracy", "NLL", "ECE"):
        first.add_column(column, justify="right")
    for when in ("before", "after"):
        first.add_row(when, *(f"{scale[when][key]:.4f}" for key in ("accuracy", "nll", "ece")))
    second = Table(title="prediction sets", title_justify="left")
    for column in ("asked for", "covered", "classes per set", "empty"):
        second.add_column(column, justify="right")
    for row in result["conformal"]:
        second.add_row(
            f"{row['target']:.1%}",
            f"{row['coverage']:.1%}",
            f"{row['mean_size']:.2f}",
            f"{row['empty']:.1%}",
        )
    third = Table(title="abstention", title_justify="left")
    for column in ("risk asked for", "risk", "answered", "if surer than"):
        third.add_column(column, justify="right")
    for row in result["abstention"]:
        risk, threshold = row["risk"], row["threshold"]
        third.add_row(
            f"{row['target']:.1%}",
            "–" if risk is None else f"{risk:.2%}",
            f"{row['coverage']:.1%}",
            "–" if threshold is None else f"{threshold:.4f}",
        )
    return [first, second, third]
