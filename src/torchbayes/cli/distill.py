"""`torchbayes distill`: one network in place of a posterior."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torchbayes import metrics
from torchbayes.applications.distill import distill as distilled
from torchbayes.cli.options import DataDir, Json
from torchbayes.core.storage import write_text
from torchbayes.data import make_loader
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.predict.results import ClassPredictive

__all__ = ["distill", "distillation_rows"]


def distill(
    run: Annotated[Path, typer.Argument(help="A run folder: the teacher.")],
    model: Annotated[
        str | None, typer.Option(help="The student's network; the teacher's if not given.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes through what the student sees.")] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    copies: Annotated[
        int, typer.Option(help="Times that each input is seen; all but one noisy.")
    ] = 2,
    noise_std: Annotated[float, typer.Option(help="Noise on normalised inputs.")] = 0.1,
    samples: Annotated[int | None, typer.Option(help="The teacher's draws.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with RUN/student.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Train one network to imitate a run's posterior predictive and score it beside its teacher.

    Writes the run folder RUN/student and RUN/distill.json.
    """
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


def distillation_rows(
    run: Path, model: str | None = None, data_dir: Path | None = None, **options: Any
) -> dict[str, dict[str, Any]]:
    """Distil a run and score teacher and student on its test set.

    Args:
        run: The teacher's run folder.
        model: The student's network; the teacher's if None.
        data_dir: Where the data is, if not in the usual place.
        **options: Of `torchbayes.applications.distill`.
    """
    trained = TrainedRun(run, data_dir)
    data = trained.data
    if not data.classes:
        raise ValueError(f"{run} is a regression on {data.name}: only classifiers can be distilled")
    make = trained.experiment.model_factory(data)
    if model is not None:
        student = dataclasses.replace(trained.experiment, model=model, model_options={})
        make = student.model_factory(data)
    draws = options.pop("samples", None)
    samples = trained.experiment.samples if draws is None else draws
    loader = make_loader(data, data.train, 1000)
    inputs = torch.cat([batch[0] for batch in loader.batches(0)])
    posterior = trained.posterior()
    result = distilled(
        make, trained.model, posterior, inputs,
        samples=samples, folder=trained.files.path / "student", **options,
    )  # fmt: skip
    tests = make_loader(data, data.test, 1000)
    targets = torch.cat([batch[1] for batch in tests.batches(0)])
    teacher, pupil = trained.predict(tests, samples), result.predict(tests, 1)
    one = sum(p.numel() for p in trained.model.parameters())
    rows: dict[str, dict[str, Any]] = {}
    for name, p in (("teacher", teacher), ("student", pupil)):
        assert isinstance(p, ClassPredictive)
        size = one if name == "teacher" else sum(w.numel() for w in result.model.parameters())
        rows[name] = {
            "networks": p.draws,
            "accuracy": metrics.accuracy(p.probs, targets),
            "nll": metrics.nll(p.probs, targets),
            "ece": metrics.ece(p.probs, targets),
            "stored": p.draws * size,
        }
    write_text(trained.files.path / "distill.json", json.dumps(rows, indent=2) + "\n")
    return rows
