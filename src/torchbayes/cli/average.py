"""`torchbayes average`: what averaging several draws of a run's weights is worth."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from torchbayes import metrics
from torchbayes.average import freeze, parallelizing, widening
from torchbayes.average.freeze import take_draws
from torchbayes.cli.options import DataDir, Json
from torchbayes.core.storage import atomic_path, write_text
from torchbayes.data import make_loader
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.plots.diversity import weight_correlations, weight_pair_figure
from torchbayes.posterior import Gaussian, Generated, Point, Posterior, Samples
from torchbayes.predict.batchnorm import recalibrate_each

__all__ = ["average", "averaged"]

_BUILDERS = {"parallelizing": parallelizing, "widening": widening}
_HOWS = ("branching", *_BUILDERS)


def average(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    how: Annotated[str, typer.Option(help="branching, parallelizing or widening.")] = "branching",
    times: Annotated[str, typer.Option(help="How many draws to average.")] = "1,4,16",
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="A JSON file for the results of all the runs.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Average draws of the weights and score them on the test set, batch norm re-estimated for each.

    *branching* averages the outputs of N networks, *parallelizing* those of N copies of every residual
    block, *widening* has N times the channels in the blocks. A run with fewer members, such as an
    ensemble of four or a single network, is averaged as far as it goes.

    Writes average-HOW.json to every run folder, with how often four networks err together (quadruple
    faults) and how weights are correlated within and between blocks; and weights.png of a random posterior.

    Example: `torchbayes average comparison/runs/* --times 1,4,16 --out average.json`
    """
    if how not in _HOWS:
        raise ValueError(f"how is {how!r}: expected {' or '.join(_HOWS)}")
    counts = _counts(times)
    results = []
    for run in runs:
        results.append(averaged(run, how, counts, seed, data_dir))
    if out is not None:
        write_text(out, json.dumps(results, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(results))
        return
    _show(results, how)


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise ValueError(f"times is {text!r}: expected whole numbers such as 1,4,16")
    return counts


def averaged(
    run: Path,
    how: str = "branching",
    counts: Sequence[int] = (1, 4, 16),
    seed: int = 0,
    data_dir: Path | None = None,
) -> dict[str, Any]:
    """Score averages of a run's draws, and keep them in its folder."""
    trained = TrainedRun(run, data_dir)
    if not trained.data.classes:
        raise ValueError(f"{run} is a regression: average compares classifiers")
    posterior = trained.posterior()
    members = {Point: 1, Samples: len(posterior) if isinstance(posterior, Samples) else 0}
    most = members.get(type(posterior), max(counts))
    counts = [count for count in counts if count <= most]
    if not counts:
        raise ValueError(f"{run} has only {most} networks to average: ask for fewer times")
    experiment = trained.experiment
    # Augmented as in training: the statistics of the hypernetwork paper are those of its last epoch.
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
    write_text(run / f"average-{how}.json", json.dumps(result, indent=2) + "\n")
    return result


def _branches(
    model: nn.Module,
    posterior: Posterior,
    count: int,
    batches: Iterable[Any],
    test: Any,
    generator: torch.Generator,
) -> Tensor:
    """The logits of every draw, (draws, examples, classes)."""
    draws = take_draws(posterior, count, generator)
    if isinstance(posterior, Generated | Gaussian):
        draws = recalibrate_each(model, draws, batches)
    networks = (freeze(model, draw, keep_statistics=True) for draw in draws)
    return torch.stack([_outputs(network, test) for network in networks])


@torch.no_grad()
def _outputs(network: nn.Module, test: Any) -> Tensor:
    return torch.cat([network(inputs) for inputs, _ in test.batches(0)])


def _row(logits: Tensor, targets: Tensor, count: int) -> dict[str, Any]:
    """Medians over as many groups of `count` networks as there are, as the paper takes them."""
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
    """How many examples 0 … 4 of four networks misclassify, averaged over groups of four."""
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
    names = (
        posterior.generated
        if isinstance(posterior, Generated)
        else [name for name, p in trained.model.named_parameters() if p.dim() > 1]
    )
    with atomic_path(trained.files.path / "weights.png") as temporary:
        pair = ((names[0], 0), (names[0], 1))
        figure = weight_pair_figure({trained.files.path.name: posterior}, pair, generator=generator)
        figure.savefig(temporary, format="png")
    return {"correlations": vars(found)}


def _show(results: list[dict[str, Any]], how: str) -> None:
    table = Table(title=f"{how}: medians over groups of draws", title_justify="left")
    for column in ("run", "×", "error", "NLL", "ECE", "error ¹", "NLL ¹", "ECE ¹"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for result in results:
        for row in result["rows"]:
            table.add_row(
                result["run"],
                str(row["times"]),
                *(
                    f"{row[prefix + name]:{form}}"
                    for prefix in ("", "probabilities_")
                    for name, form in (("error", ".2%"), ("nll", ".4f"), ("ece", ".4f"))
                ),
            )
    console = Console()
    console.print(table)
    console.print("¹ probabilities averaged instead of logits")
    shapes = Table(
        title="misclassified by 0 … 4 of four networks; correlations of weights in and between blocks",
        title_justify="left",
    )
    for column in ("run", "0", "1", "2", "3", "4", "|r| within", "between"):
        shapes.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for result in results:
        faults = [f"{count:.0f}" for count in result.get("quadruple_faults", [])]
        r = result.get("correlations", {})
        both = [r.get("within"), r.get("between")]
        shown = ["–" if value is None else f"{value:.3f}" for value in both]
        if faults or r:
            shapes.add_row(result["run"], *(faults if faults else ["–"] * 5), *shown)
    if shapes.row_count:
        console.print(shapes)
