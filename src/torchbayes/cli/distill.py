"""`torchbayes distill`: one network in place of a posterior."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json, RunSamples, Seed

__all__ = ["distill"]


def distill(
    run: Annotated[Path, typer.Argument(help="Run folder of the teacher.")],
    model: Annotated[
        str | None, typer.Option(help="The student's network.", show_default="the teacher's")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes through the student's training set.")] = 20,
    lr: Annotated[float, typer.Option(help="Adam's learning rate.")] = 1e-3,
    copies: Annotated[
        int, typer.Option(help="Copies of each input, all but one of them noisy.")
    ] = 2,
    noise_std: Annotated[
        float, typer.Option(help="Standard deviation of the noise on normalised inputs.")
    ] = 0.1,
    samples: RunSamples = None,
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue RUN/student.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Train one network to imitate a run's posterior predictive and score it beside its teacher.

    Writes the run folder RUN/student and RUN/distill.json.
    """
    from torchbayes.experiments.distill_run import distillation_rows

    rows = distillation_rows(
        run, model, data_dir,
        epochs=epochs, lr=lr, copies=copies, noise_std=noise_std, samples=samples, seed=seed,
        resume=resume, progress=not as_json,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(title=f"{run}: the posterior and its student", title_justify="left")
    for column in ("", "networks", "accuracy", "NLL", "ECE", "numbers stored"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        table.add_row(
            name, str(row["networks"]), f"{row['accuracy']:.4f}", f"{row['nll']:.4f}",
            f"{row['ece']:.4f}", f"{row['stored']:,}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(f"student: {run / 'student'}")
