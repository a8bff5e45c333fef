"""`torchbayes distill`: one network in place of a posterior."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from torchbayes.cli.options import DataDir, Device, Json, RunSamples, Seed
from torchbayes.cli.output import answer, table

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
    device: Device = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Train one network to imitate a run's posterior predictive and score it beside its teacher.

    Writes the run folder RUN/student and RUN/distill.json.
    """
    import torch

    from torchbayes import applications
    from torchbayes.core.device import process_device
    from torchbayes.core.storage import write_json
    from torchbayes.data import make_loader
    from torchbayes.experiments.trained_run import TrainedRun, on_cpu
    from torchbayes.metrics.scores import probability_scores
    from torchbayes.predict.results import ClassPredictive

    trained = TrainedRun(run, data_dir, device=process_device(device))
    trained.require_classes("only classifiers can be distilled")
    data, experiment = trained.data, trained.experiment
    if model is not None:
        experiment = dataclasses.replace(experiment, model=model, model_options={})
    draws = experiment.samples if samples is None else samples
    inputs = torch.cat([batch[0] for batch in make_loader(data, data.train, 1000).batches(0)])
    student = applications.distill(
        experiment.model_factory(data), trained.model, trained.posterior(), inputs,
        samples=draws, copies=copies, noise_std=noise_std, epochs=epochs, lr=lr, seed=seed,
        folder=run / "student", resume=resume, progress=not as_json,
        device=trained.device,
    )  # fmt: skip
    teacher, targets = trained.classify_split(data.test, draws)
    pupil = on_cpu(student.predict(make_loader(data, data.test, 1000), 1))
    assert isinstance(pupil, ClassPredictive)
    rows = {
        name: {
            "networks": p.draws,
            **probability_scores(p.probs, targets),
            "stored": p.draws * sum(w.numel() for w in network.parameters()),
        }
        for name, p, network in (
            ("teacher", teacher, trained.model),
            ("student", pupil, student.model),
        )
    }
    write_json(run / "distill.json", rows)
    answer(
        rows,
        as_json,
        table(
            f"{run}: the posterior and its student",
            ("", "networks", "accuracy", "NLL", "ECE", "numbers stored"),
            (
                [name, str(row["networks"])]
                + [f"{row[key]:.4f}" for key in ("accuracy", "nll", "ece")]
                + [f"{row['stored']:,}"]
                for name, row in rows.items()
            ),
        ),
        f"student: {run / 'student'}",
    )
