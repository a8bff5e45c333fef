"""`torchbayes diagnose`: whether a sampler's chains have met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchbayes.checks.diagnosis import Quantity, log_posterior
from torchbayes.checks.diagnosis import diagnose as diagnosed
from torchbayes.cli.options import DataDir, Json
from torchbayes.core.storage import atomic_path, write_text
from torchbayes.data import make_loader
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.plots.traces import trace_figure
from torchbayes.posterior import Samples
from torchbayes.train.chains import SamplerMethod, prior_called
from torchbayes.train.methods import find_method, method_options

__all__ = ["diagnose", "diagnosis_of"]

_TRAINING = 2000
_ONE_CHAIN = (
    "R-hat needs at least 2 chains and this run has 1: train with --set chains=4, or under torchrun"
)


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder of a sampler.")],
    inputs: Annotated[int, typer.Option(help="Test inputs whose predictions to look at.")] = 200,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show whether a sampler's chains agree, how many draws they are worth, and how they went.

    *R-hat* near 1 means that chains agree (above 1.01 they do not yet); it is of predictions, because
    weights mislead. The *effective sample size* says how many independent draws the chains are worth.
    The *kinetic temperature* is 1 for a sampler whose noise is right.

    Writes diagnosis.json and traces.png to the run folder.
    """
    found = diagnosis_of(run, inputs, data_dir)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    table = Table(
        title=f"{run}: {found['chains']} chains of {found['draws']} draws", title_justify="left"
    )
    for column in ("of", "R-hat median", "R-hat worst", "ESS median", "ESS least"):
        table.add_column(column, justify="left" if column == "of" else "right")
    for name in ("predictions", "log_posterior"):
        row = found[name]
        table.add_row(
            name.replace("_", "-"),
            *(_shown(row[key], 3) for key in ("rhat_median", "rhat_worst")),
            *(_shown(row[key], 1) for key in ("ess_median", "ess_least")),
        )
    console.print(table)
    if found["chains"] < 2:
        console.print(_ONE_CHAIN, soft_wrap=True)
    if found["layers"]:
        layers = Table(title="second half of the chains, by layer", title_justify="left")
        columns = [k for k in next(iter(found["layers"].values()))]
        for column in ("layer", *(c.replace("_", " ") for c in columns)):
            layers.add_column(column, justify="left" if column == "layer" else "right")
        for layer, values in found["layers"].items():
            layers.add_row(layer or "(the network)", *(f"{values[c]:.4g}" for c in columns))
        console.print(layers)
        console.print(f"traces: {run / 'traces.png'}")
    else:
        console.print("this run has no traces: it was trained before they were kept")


def diagnosis_of(run: Path, inputs: int = 200, data_dir: Path | None = None) -> dict[str, Any]:
    """Diagnose a run and keep diagnosis.json and traces.png in its folder."""
    if inputs < 1:
        raise ValueError(f"inputs is {inputs}: expected at least 1 test input to predict")
    trained = TrainedRun(run, data_dir)
    samples, method = trained.posterior(), find_method(trained.experiment.method)
    if not issubclass(method, SamplerMethod) or not isinstance(samples, Samples):
        raise ValueError(
            f"{run} is of method {method.name!r}, which has no chains: diagnose a run of a sampler such as "
            "atmc"
        )
    settings = {name: option.default for name, option in method_options(method).items()}
    settings |= trained.experiment.options
    density = log_posterior(
        trained.model,
        samples,
        *_some(trained, trained.data.train, _TRAINING),
        prior=prior_called(settings["prior"], settings["prior_precision"]),
        likelihood=trained.likelihood(),
        train_size=trained.data.train_size,
        temperature=settings["temperature"],
    )
    result = diagnosed(
        trained.model,
        samples,
        _some(trained, trained.data.test, inputs)[0],
        likelihood=trained.likelihood(),
        log_posteriors=density,
    )
    assert result.log_posterior is not None
    traces = trained.files.read_traces()
    found: dict[str, Any] = {
        "chains": result.chains,
        "draws": result.draws,
        "predictions": _summary(result.predictions),
        "log_posterior": _summary(result.log_posterior),
        "layers": _layers(traces),
    }
    write_text(trained.files.path / "diagnosis.json", json.dumps(found, indent=2) + "\n")
    if traces:
        with atomic_path(trained.files.path / "traces.png") as temporary:
            trace_figure(traces).savefig(temporary, format="png")
    return found


def _some(trained: TrainedRun, split: Any, count: int) -> tuple[Tensor, Tensor]:
    """The first examples of a split, normalised; of training data at most `count` of them."""
    loader = make_loader(trained.data, split, min(count, len(split)))
    inputs, targets = next(iter(loader.batches(0)))
    return inputs, targets


def _summary(quantity: Quantity) -> dict[str, float | None]:
    """JSON has no NaN: a number that never changes has no R-hat and counts for nothing here."""
    r, e = quantity.rhat, quantity.ess
    return {
        "rhat_median": None if r is None else _finite(np.nanmedian(r)),
        "rhat_worst": None if r is None else _finite(np.nanmax(r)),
        "ess_median": _finite(np.nanmedian(e)),
        "ess_least": _finite(np.nanmin(e)),
    }


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _layers(traces: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over the second half of all chains."""
    if not traces:
        return {}
    half = max(row["update"] for row in traces) / 2
    late = [row for row in traces if row["update"] > half]
    names = [n for n in ("temperature", "thermostat", "update_size") if n in late[0]]
    return {
        layer: {
            name: float(torch.tensor([row[name][layer] for row in late]).double().mean())
            for name in names
        }
        for layer in late[0][names[0]]
    }
