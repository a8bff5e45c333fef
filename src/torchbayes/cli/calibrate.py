"""`torchbayes calibrate`: temperature, prediction sets and abstention for a finished run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from torchbayes.cli.options import DataDir, Device, Json, RunFolder, RunSamples, numbers
from torchbayes.cli.output import answer, cell, table, visible

__all__ = ["calibrate"]


def calibrate(
    run: RunFolder,
    coverages: Annotated[
        str,
        typer.Option(
            help="Comma-separated shares of prediction sets or intervals that should contain the truth."
        ),
    ] = "0.8,0.9,0.95",
    risks: Annotated[
        str, typer.Option(help="Comma-separated shares of answers that may be wrong.")
    ] = "0.01,0.02,0.05",
    samples: RunSamples = None,
    device: Device = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Calibrate a run: temperature, conformal prediction sets, abstention; intervals of a regression.

    Fits on the run's validation split, or, if it has none, on half of its test split (and scores on the
    other half). Writes calibration.json to the run folder.
    """
    from torchbayes.core.device import process_device
    from torchbayes.experiments import calibrate as calibrating
    from torchbayes.experiments.trained_run import TrainedRun

    expected = "shares such as 0.8,0.9"
    found = calibrating.calibrate(
        TrainedRun(run, data_dir, device=process_device(device)),
        coverages=numbers(coverages, float, "coverages", expected),
        risks=numbers(risks, float, "risks", expected),
        samples=samples,
    )
    result = dict(found.figures)
    if found.warning is not None and as_json:
        typer.echo(visible(f"worse: {found.warning}"), err=True)
    if "intervals" in result:
        _answer_intervals(result, as_json, found.warning)
        return
    scale = result["temperature"]
    said = "`torchbayes predict` uses all of this from now on (--raw: none of it)"
    if found.warning is not None:
        said = f"worse: {found.warning}; sets and abstention are used"
    answer(
        result,
        as_json,
        _splits(result),
        table(
            f"temperature {scale['value']:.3f}",
            ("", "accuracy", "NLL", "ECE"),
            (
                [when, *(f"{scale[when][key]:.4f}" for key in ("accuracy", "nll", "ece"))]
                for when in ("before", "after")
            ),
        ),
        table(
            "prediction sets",
            ("target", "covered", "classes per set", "empty"),
            (
                [f"{row['target']:.1%}", f"{row['coverage']:.1%}", f"{row['mean_size']:.2f}",
                 f"{row['empty']:.1%}"]
                for row in result["conformal"]
            ),
            left=0,
        ),
        table(
            "abstention",
            ("target risk", "risk", "answered", "if confidence exceeds"),
            (
                [f"{row['target']:.1%}", cell(row["risk"], ".2%"), f"{row['coverage']:.1%}",
                 cell(row["threshold"], ".4f")]
                for row in result["abstention"]
            ),
            left=0,
        ),
        said,
    )  # fmt: skip


_SCORES = {
    None: "the posterior's own",
    "residual": "absolute residual",
    "quantile": "quantile (CQR)",
}


def _answer_intervals(result: dict[str, Any], as_json: bool, warning: str | None) -> None:
    answer(
        result,
        as_json,
        _splits(result),
        table(
            "intervals",
            ("interval", "target", "covered", "mean width"),
            (
                [_SCORES[row["score"]], f"{row['target']:.1%}", f"{row['coverage']:.1%}",
                 cell(row["width"], ".4g")]
                for row in result["intervals"]
            ),
        ),
        *([] if warning is None else [f"worse: {warning}"]),
        "`torchbayes predict` uses the quantile intervals from now on (--raw: the posterior's own)",
    )  # fmt: skip


def _splits(result: dict[str, Any]) -> str:
    return (
        f"fitted on {result['fitted_on']} ({result['fitted']:,} examples), "
        f"scored on {result['scored_on']} ({result['scored']:,})"
    )
