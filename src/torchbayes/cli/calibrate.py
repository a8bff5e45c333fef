"""`torchbayes calibrate`: temperature, prediction sets and abstention of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json
from torchbayes.experiments.calibrate import calibrate as calibrated
from torchbayes.experiments.trained_run import TrainedRun

__all__ = ["calibrate"]


def calibrate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    coverages: Annotated[
        str, typer.Option(help="How often a prediction set is to have the true class.")
    ] = "0.8,0.9,0.95",
    risks: Annotated[
        str, typer.Option(help="The share of answers that may be wrong.")
    ] = "0.01,0.02,0.05",
    samples: Annotated[int | None, typer.Option(help="Draws to predict with.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a finished run's probabilities, sets and refusals keep their word.

    Fitted on the run's validation split, or on half of its test split if it has none (then scored on the
    other half). Writes calibration.json to the run folder.
    """
    result = calibrated(
        TrainedRun(run, data_dir),
        coverages=_shares(coverages, "coverages"),
        risks=_shares(risks, "risks"),
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


def _shares(text: str, name: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}: expected shares such as 0.8,0.9") from None


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
