"""`torchbayes prune`: how many weights a posterior can do without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torchbayes import metrics
from torchbayes.applications.prune import prune as pruned
from torchbayes.cli.options import DataDir, Json
from torchbayes.core.storage import write_text
from torchbayes.data import make_loader
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.plots.pruning import pruning_figure
from torchbayes.posterior import Gaussian, Posterior
from torchbayes.predict.results import ClassPredictive
from torchbayes.report.attach import save_picture

__all__ = ["prune", "pruning_rows"]

SHARES = (0.0, 0.5, 0.75, 0.95, 0.98)  # as in the paper's Table 3


def prune(
    run: Annotated[Path, typer.Argument(help="A run folder with a Gaussian posterior.")],
    fractions: Annotated[str, typer.Option(help="Shares of the weights to remove.")] = ",".join(
        map(str, SHARES)
    ),
    save: Annotated[float, typer.Option(help="The share whose pruned posterior is saved.")] = 0.75,
    samples: Annotated[int | None, typer.Option(help="Draws to predict with.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Remove the weights with the least |mean|/std and show what it costs on the test set.

    Writes prune.json, pictures/prune.png and pruned.safetensors to the run folder; the picture is in the
    page that `torchbayes report` writes.
    """
    rows = pruning_rows(run, _shares(fractions), save, samples, data_dir)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(title=f"{run}: test error of what is left", title_justify="left")
    for column in ("removed", "error", "NLL", "weights left"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['fraction']:.0%}", f"{row['error']:.2%}", f"{row['nll']:.4f}", f"{row['left']:,}"
        )
    console = Console()
    console.print(table)
    console.print(
        f"picture: {run / 'pictures' / 'prune.png'}   {save:.0%} pruned: {run / 'pruned.safetensors'}"
    )


def pruning_rows(
    run: Path,
    shares: Sequence[float] = SHARES,
    save: float = 0.75,
    samples: int | None = None,
    data_dir: Path | None = None,
) -> list[dict[str, Any]]:
    """Score a run's posterior with more and more of its weights removed, and keep the files beside it."""
    trained = TrainedRun(run, data_dir)
    if not trained.data.classes:
        raise ValueError(
            f"{run} is a regression on {trained.data.name}: this table is of a classifier's errors; use "
            "torchbayes.prune in Python"
        )
    posterior = trained.posterior()
    if not isinstance(posterior, Gaussian):
        raise ValueError(
            f"{run} has a {type(posterior).__name__} posterior: pruning needs a Gaussian one, such as "
            "that of method bbb"
        )
    kept = pruned(posterior, save)
    rows = [_row(trained, pruned(posterior, share), share, samples) for share in shares]
    kept.save(trained.files.path / "pruned.safetensors")
    write_text(trained.files.path / "prune.json", json.dumps(rows, indent=2) + "\n")
    errors = [(row["fraction"], row["error"]) for row in rows]
    save_picture(
        run,
        "prune",
        pruning_figure(posterior, errors),
        title="Signal-to-noise ratio and pruning",
        caption="Left: how far the weights stand out of their own noise. Right: the test error after the "
        "weights that stand out least were removed.",
        alt="Test error by the share of weights removed: "
        + ", ".join(f"{share:.0%} {error:.2%}" for share, error in errors),
    )
    return rows


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"fractions is {text!r}: expected shares such as 0,0.5,0.75") from None


def _row(
    trained: TrainedRun, posterior: Posterior, share: float, samples: int | None
) -> dict[str, Any]:
    data = trained.data
    loader = make_loader(data, data.test, 1000)
    targets = torch.cat([batch[1] for batch in loader.batches(0)])
    result = trained.predict(loader, samples, posterior=posterior)
    assert isinstance(result, ClassPredictive)
    return {
        "fraction": share,
        "error": 1 - metrics.accuracy(result.probs, targets),
        "nll": metrics.nll(result.probs, targets),
        "left": sum(int(t.count_nonzero()) for t in posterior.mean().values()),
    }
