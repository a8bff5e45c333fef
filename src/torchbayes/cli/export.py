"""`torchbayes export`: a finished run as a file that runs without torchbayes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchbayes.cli import options as opt
from torchbayes.cli.output import answer, notice

__all__ = ["export"]


def export(
    run: opt.RunFolder,
    format: Annotated[
        str | None,
        typer.Option(
            help="onnx (onnxruntime and others) or pt2 (torch.export.load).",
            show_default="the ending of --out, or onnx",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="model.onnx in the run folder"),
    ] = None,
    samples: opt.RunSamples = None,
    mean: Annotated[
        bool, typer.Option("--mean", help="The mean weights instead of draws.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave out the run's calibration.json, if it has one.")
    ] = False,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Write a run to an ONNX or pt2 file that takes any number of examples and needs no torchbayes.

    The file holds the draws, the run's normalisation and its temperature; it gives probabilities, or mean and
    std, and the parts of the uncertainty. It is held against torchbayes' own prediction before it is written.

    Example: `torchbayes export runs/lenet --format onnx --samples 8`
    """
    from torchbayes.experiments.export_run import export_run

    notice(f"tracing and checking {run}; every draw is part of the file", as_json)
    file, source = export_run(
        run, out, format=format, samples=samples, mean=mean, raw=raw, data_dir=data_dir
    )
    size = file.path.stat().st_size
    result = {
        "file": str(file.path), "format": file.format, "draws": file.draws, "bytes": size,
        "inputs": list(file.inputs), "outputs": list(file.outputs),
        "differences": dict(file.differences), "checked_on": source, "about": dict(file.about),
    }  # fmt: skip
    answer(
        result,
        as_json,
        f"{file.path}: {file.draws} draw{'s' * (file.draws != 1)}, {size / 1e6:.1f} MB",
        f"outputs: {', '.join(file.outputs)}",
        f"largest difference to torchbayes predict: {file.difference:.1e} (on {source})",
    )
