"""Distilling a finished run, and its file distill.json: the student beside its teacher."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from torchbayes import metrics
from torchbayes.applications.distill import distill
from torchbayes.core.storage import write_text
from torchbayes.data import make_loader
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.predict.results import ClassPredictive

__all__ = ["distillation_rows"]


def distillation_rows(
    run: Path, model: str | None = None, data_dir: Path | None = None, **options: Any
) -> dict[str, dict[str, Any]]:
    """Distil a run and score teacher and student on its test set.

    Args:
        run: The teacher's run folder.
        model: The student's network; the teacher's if None.
        data_dir: Where the data is, if not in the usual place.
        **options: Further arguments of `torchbayes.applications.distill`.
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
    result = distill(
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
