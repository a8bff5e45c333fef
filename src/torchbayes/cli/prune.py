"""`torchbayes prune`: how many weights can be removed from a posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchbayes.cli.options import DataDir, Device, Json, RunSamples, numbers
from torchbayes.cli.output import answer, table

__all__ = ["prune"]


def prune(
    run: Annotated[Path, typer.Argument(help="Run folder with a Gaussian posterior.")],
    fractions: Annotated[
        str, typer.Option(help="Comma-separated shares of the weights to remove.")
    ] = "0.0,0.5,0.75,0.95,0.98",
    save: Annotated[
        float, typer.Option(help="Share at which the pruned posterior is saved.")
    ] = 0.75,
    samples: RunSamples = None,
    device: Device = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Remove the weights with the lowest |mean|/std and show the effect on the test set.

    Writes prune.json, pictures/prune.png and pruned.safetensors to the run folder; `torchbayes report`
    shows the picture.
    """
    from torchbayes.core.device import process_device
    from torchbayes.experiments.prune_run import pruning_rows

    shares = numbers(fractions, float, "fractions", "shares such as 0,0.5,0.75")
    rows = pruning_rows(run, shares, save, samples, data_dir, process_device(device))
    answer(
        rows,
        as_json,
        table(
            f"{run}: test error after pruning",
            ("removed", "error", "NLL", "weights left"),
            (
                [f"{r['fraction']:.0%}", f"{r['error']:.2%}", f"{r['nll']:.4f}", f"{r['left']:,}"]
                for r in rows
            ),
            left=0,
        ),
        f"picture: {run / 'pictures' / 'prune.png'}   {save:.0%} pruned: {run / 'pruned.safetensors'}",
    )
