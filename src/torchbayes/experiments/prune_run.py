"""Prune a finished run; writes prune.json, pruned.safetensors and pictures/prune.png to its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchbayes import metrics
from torchbayes.applications.prune import prune
from torchbayes.core.storage import write_json
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.plots.pruning import pruning_figure
from torchbayes.posterior import Gaussian
from torchbayes.report.attach import save_picture

__all__ = ["SHARES", "pruning_rows"]

SHARES = (0.0, 0.5, 0.75, 0.95, 0.98)  # as in the paper's Table 3


def pruning_rows(
    run: Path,
    shares: Sequence[float] = SHARES,
    save: float = 0.75,
    samples: int | None = None,
    data_dir: Path | None = None,
    device: torch.device | None = None,
) -> list[dict[str, Any]]:
    """Score a run's posterior with increasing shares of its weights removed."""
    trained = TrainedRun(run, data_dir, device=device)
    trained.require_classes(
        "this table is of a classifier's errors; use torchbayes.applications.prune in Python"
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
    write_json(trained.files.path / "prune.json", {"rows": rows})
    errors = [(row["fraction"], row["error"]) for row in rows]
    save_picture(
        run,
        "prune",
        pruning_figure(posterior, errors),
        title="Signal-to-noise ratio and pruning",
        caption="Left: signal-to-noise ratios of the weights. Right: test error after the weights with the "
        "lowest ratios were removed.",
        alt="Test error by the share of weights removed: "
        + ", ".join(f"{share:.0%} {error:.2%}" for share, error in errors),
    )
    return rows


def _row(
    trained: TrainedRun, posterior: Gaussian, share: float, samples: int | None
) -> dict[str, Any]:
    result, targets = trained.classify_split(trained.data.test, samples, posterior=posterior)
    return {
        "fraction": share,
        "error": 1 - metrics.accuracy(result.probs, targets),
        "nll": metrics.nll(result.probs, targets),
        "left": sum(int(t.count_nonzero()) for t in posterior.mean().values()),
    }
