"""`torchbayes diagnose`: whether a sampler's chains agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from torchbayes.cli.options import DataDir, Device, Json
from torchbayes.cli.output import answer, cell, table

__all__ = ["diagnose"]


def diagnose(
    run: Annotated[Path, typer.Argument(help="Run folder of a sampler.")],
    inputs: Annotated[
        int, typer.Option(help="Number of test inputs whose predictions are examined.")
    ] = 200,
    device: Device = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show whether a sampler's chains agree, how many draws they are worth, and how they moved.

    *R-hat* near 1 means that the chains agree (above 1.01 they do not yet); it is computed from
    predictions, because weights mislead. The *effective sample size* says how many independent draws the
    chains are worth. The *kinetic temperature* is 1 for a sampler whose noise is right.

    Writes diagnosis.json and traces.png to the run folder.
    """
    from torchbayes.core.device import process_device
    from torchbayes.experiments.diagnose_run import diagnosis_of

    found = diagnosis_of(run, inputs, data_dir, process_device(device))
    parts: list[Table | str] = [
        table(
            f"{run}: {found['chains']} chains of {found['draws']} draws",
            ("of", "R-hat median", "R-hat worst", "ESS median", "ESS least"),
            (
                [name.replace("_", "-")]
                + [cell(found[name][key], ".3f") for key in ("rhat_median", "rhat_worst")]
                + [cell(found[name][key], ".1f") for key in ("ess_median", "ess_least")]
                for name in ("predictions", "log_posterior")
            ),
        )
    ]
    if found["chains"] < 2:
        parts.append(
            "R-hat needs at least 2 chains and this run has 1: train with --set chains=4, or under torchrun"
        )
    layers = found["layers"]
    if layers:
        columns = list(next(iter(layers.values())))
        rows = (
            [layer or "(the network)", *(f"{values[c]:.4g}" for c in columns)]
            for layer, values in layers.items()
        )
        headings = ["layer", *(c.replace("_", " ") for c in columns)]
        parts.append(table("second half of the chains, by layer", headings, rows))
        parts.append(f"traces: {run / 'traces.png'}")
    else:
        parts.append("this run has no traces: it was trained before they were recorded")
    answer(found, as_json, *parts)
