"""Score averages of several draws of a finished run's weights; writes average-HOW.json."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes import metrics
from torchbayes.average import freeze, parallelizing, widening
from torchbayes.average.freeze import take_draws
from torchbayes.core.batch import device_of
from torchbayes.core.storage import write_json
from torchbayes.data import make_loader
from torchbayes.experiments.made_with import made_with
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.plots.diversity import random_weights, weight_correlations, weight_pair_figure
from torchbayes.plots.figure import save_png
from torchbayes.posterior import Gaussian, Generated, Point, Posterior, Samples
from torchbayes.predict.batchnorm import recalibrate_each
from torchbayes.train.run_folder import RunFolder

__all__ = ["averaged", "averaged_with"]

_BUILDERS = {"parallelizing": parallelizing, "widening": widening}
_HOWS = ("branching", *_BUILDERS)


def averaged(
    run: Path,
    how: str = "branching",
    counts: Sequence[int] = (1, 4, 16),
    seed: int = 0,
    data_dir: Path | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Score averages of a run's draws, and write the scores to its folder.

    Args:
        run: Run folder.
        how: `branching` (averages outputs of networks), `parallelizing` or `widening`.
        counts: Numbers of draws to average.
        seed: Random seed.
        data_dir: Folder of the data, if not the usual one.
        device: Device to compute on; the CPU if None.
    """
    if how not in _HOWS:
        raise ValueError(f"how is {how!r}: expected {' or '.join(_HOWS)}")
    trained = TrainedRun(run, data_dir, device=device)
    trained.require_classes("average compares classifiers")
    posterior = trained.posterior()
    members = {Point: 1, Samples: len(posterior) if isinstance(posterior, Samples) else 0}
    most = members.get(type(posterior), max(counts))
    made = averaged_with(trained.files, counts, seed)
    counts = [count for count in counts if count <= most]
    if not counts:
        raise ValueError(f"{run} has only {most} networks to average: ask for fewer times")
    experiment = trained.experiment
    # Augmented as in training: the hypernetwork paper uses the statistics of the last epoch.
    batches = make_loader(
        trained.data, trained.data.train, experiment.batch_size,
        shuffle=True, augment=experiment.augment, seed=seed,
    )  # fmt: skip
    test = make_loader(trained.data, trained.data.test, 500)
    targets = torch.cat([targets for _, targets in test.batches(0)])
    generator = torch.Generator().manual_seed(seed)
    result: dict[str, Any] = {
        "run": run.name,
        "method": experiment.method,
        "options": experiment.options,
        "seed": experiment.seed,
        "how": how,
        "rows": [],
    }
    if how == "branching":
        logits = _branches(trained.model, posterior, max(counts), batches, test, generator)
        for count in counts:
            result["rows"].append(_row(logits, targets, count))
        result |= _faults(logits.argmax(2), targets)
    else:
        for count in counts:
            network = _BUILDERS[how](trained.model, posterior, count, batches, generator=generator)
            outputs = _outputs(network, test)[None]
            result["rows"].append(_row(outputs, targets, 1) | {"times": count})
    if isinstance(posterior, Generated | Gaussian):
        result |= _shape(trained, posterior, generator)
    write_json(run / f"average-{how}.json", {**result, "made_with": made})
    return result


def averaged_with(run: RunFolder, counts: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Return what the scores of `averaged` with these arguments are made with."""
    return made_with(run, counts=list(counts), seed=seed)


def _branches(
    model: nn.Module,
    posterior: Posterior,
    count: int,
    batches: Iterable[Any],
    test: Any,
    generator: torch.Generator,
) -> Tensor:
    """Compute the logits of every draw, (draws, examples, classes)."""
    draws = take_draws(posterior, count, generator)
    if isinstance(posterior, Generated | Gaussian):
        draws = recalibrate_each(model, draws, batches)
    networks = (freeze(model, draw, keep_statistics=True) for draw in draws)
    return torch.stack([_outputs(network, test) for network in networks])


@torch.no_grad()
def _outputs(network: nn.Module, test: Any) -> Tensor:
    device = device_of(network)
    return torch.cat([network(inputs.to(device)).cpu() for inputs, _ in test.batches(0)])


def _row(logits: Tensor, targets: Tensor, count: int) -> dict[str, Any]:
    """Compute medians over all groups of `count` networks, as the paper does."""
    groups = logits[: len(logits) // count * count].split(count)
    row: dict[str, Any] = {"times": count, "groups": len(groups)}
    for prefix, averaged in (
        ("", [group.mean(0).softmax(1) for group in groups]),
        ("probabilities_", [group.softmax(2).mean(0) for group in groups]),
    ):
        scores = {
            "error": [1 - metrics.accuracy(probs, targets) for probs in averaged],
            "nll": [metrics.nll(probs, targets) for probs in averaged],
            "ece": [metrics.ece(probs, targets) for probs in averaged],
        }
        row |= {f"{prefix}{name}": statistics.median(v) for name, v in scores.items()}
    return row


def _faults(predictions: Tensor, targets: Tensor) -> dict[str, Any]:
    """Count the examples that 0 … 4 of four networks misclassify, averaged over groups of four."""
    if len(predictions) < 4:
        return {}
    fours = predictions[: len(predictions) // 4 * 4].split(4)
    counts = torch.tensor([metrics.fault_counts(four, targets) for four in fours]).double()
    return {
        "quadruple_faults": counts.mean(0).tolist(),
        "double_fault": metrics.double_fault(predictions, targets),
    }


def _shape(trained: TrainedRun, posterior: Posterior, generator: torch.Generator) -> dict[str, Any]:
    found = weight_correlations(trained.model, posterior, generator=generator)
    first, folder = random_weights(trained.model, posterior)[0], trained.files.path
    pair = ((first, 0), (first, 1))
    figure = weight_pair_figure({folder.name: posterior}, pair, generator=generator)
    save_png(figure, folder / "weights.png")
    return {"correlations": vars(found)}
