"""Pruning a finished run, and its files: prune.json, pruned.safetensors and pictures/prune.png."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchbayes import metrics
from torchbayes.applications.prune import prune
from torchbayes.core.storage import write_text
from torchbayes.data import make_loader
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.plots.pruning import pruning_figure
from torchbayes.posterior import Gaussian, Posterior
from torchbayes.predict.results import ClassPredictive
from torchbayes.report.attach import save_picture

__all__ = ["pruning_rows"]

SHARES = (0.0, 0.5, 0.75, 0.95, 0.98)  # as in the paper's Table 3


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
            "torchbayes.applications.prune in Python"
        )
    posterior = trained.posterior()
    if not isinstance(posterior, Gaussian):
        raise ValueError(
            f"{run} has a {type(posterior).__name__} posterior: pruning needs a Gaussian one, such as "
            "that of method bbb"
        )
    kept = prune(posterior, save)
    rows = [_row(trained, prune(posterior, share), share, samples) for share in shares]
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
