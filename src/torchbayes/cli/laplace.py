"""`torchbayes laplace`: a posterior for a run of one network."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from torchbayes.cli.options import DataDir, Device, Json, RunSamples
from torchbayes.cli.output import answer, cell, notice, table

__all__ = ["laplace"]

_SHOWN = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "ece": "ECE",
    "coverage50": "in 50 %",
    "coverage90": "in 90 %",
    "auroc_ood": "AUROC OOD",
}


def laplace(
    run: Annotated[
        Path, typer.Argument(help="Run folder with one network, such as one of map, mle or swa.")
    ],
    structure: Annotated[
        str, typer.Option(help="kronecker, diagonal, full or low_rank.")
    ] = "kronecker",
    subset: Annotated[
        str, typer.Option(help="Uncertain weights: last_layer, all, or a pattern such as layer4.*.")
    ] = "last_layer",
    curvature: Annotated[
        str | None,
        typer.Option(
            help="ggn, sampled or empirical.", show_default="ggn for up to 32 outputs, else sampled"
        ),
    ] = None,
    prior: Annotated[
        float | None, typer.Option(help="Precision of the prior.", show_default="the run's own")
    ] = None,
    evidence: Annotated[
        bool,
        typer.Option("--evidence/--no-evidence", help="Let the evidence choose the precision."),
    ] = True,
    samples: RunSamples = None,
    out: Annotated[
        Path | None, typer.Option(help="New run folder; RUN-laplace if not given.")
    ] = None,
    device: Device = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Give a trained network a posterior by Laplace's approximation: one pass over its training data.

    Writes a run folder that `evaluate`, `predict`, `report` and the other commands take, and shows the
    scores on the test set before and after: with draws of the weights, and with the network linearised in
    them. The run itself stays as it is.

    Example: `torchbayes laplace runs/digits-mlp-map-0`
    """
    from torchbayes.core.device import process_device
    from torchbayes.core.reading import read_json
    from torchbayes.experiments.laplace_run import laplace_run

    folder = run.with_name(f"{run.name}-laplace") if out is None else out
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: notice(f"warning: {message}", as_json)
        rows = laplace_run(
            run, folder, structure=structure, subset=subset, curvature=curvature, prior=prior,
            evidence=evidence, samples=samples, data_dir=data_dir,
                device=process_device(device),
        )  # fmt: skip
    shown = {
        key: title for key, title in _SHOWN.items() if any(key in row for row in rows.values())
    }
    scores = table(
        f"{run}, before and after",
        ("", *shown.values()),
        ([name, *(cell(row.get(key), ".4f") for key in shown)] for name, row in rows.items()),
    )
    strange = read_json(folder / "about.json", "run `torchbayes evaluate` again")["ood"]
    notes = [f"out of distribution (OOD): {strange}", f"written to {folder}"]
    answer({"run": str(folder), "scores": rows}, as_json, scores, *notes)
