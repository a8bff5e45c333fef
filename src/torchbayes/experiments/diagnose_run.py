"""Diagnose the chains of a finished run; writes diagnosis.json and traces.png to its folder."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbayes.checks.diagnosis import Quantity, diagnose, log_posterior
from torchbayes.core.storage import write_json
from torchbayes.data import make_loader
from torchbayes.experiments.evaluation import finite
from torchbayes.experiments.options import translated
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.plots.figure import save_png
from torchbayes.plots.traces import trace_figure
from torchbayes.posterior import Samples
from torchbayes.prior import as_prior
from torchbayes.train.chains import SamplerMethod
from torchbayes.train.registry import find_method, method_options

__all__ = ["diagnosis_of"]

_TRAINING = 2000


def diagnosis_of(
    run: Path,
    inputs: int = 200,
    data_dir: Path | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Diagnose a run and write diagnosis.json and traces.png to its folder."""
    if inputs < 1:
        raise ValueError(f"inputs is {inputs}: expected at least 1 test input to predict")
    trained = TrainedRun(run, data_dir, device=device)
    samples, method = trained.posterior(), find_method(trained.experiment.method)
    if not issubclass(method, SamplerMethod) or not isinstance(samples, Samples):
        raise ValueError(
            f"{run} was trained with method {method.name!r}, which has no chains: diagnose a sampler's run, "
            "such as atmc's"
        )
    settings = {name: option.default for name, option in method_options(method).items()}
    settings |= translated(trained.experiment.options, steps_per_epoch=1)
    density = log_posterior(
        trained.model,
        samples,
        *_some(trained, trained.data.train, _TRAINING),
        prior=as_prior(settings["prior"]),
        likelihood=trained.likelihood(),
        train_size=trained.data.train_size,
        # By default likelihood and prior have the same one, which R-hat and effective size do not depend on.
        temperature=1.0 if settings["temperature"] is None else settings["temperature"],
    )
    result = diagnose(
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
    write_json(trained.files.path / "diagnosis.json", found)
    if traces:
        save_png(trace_figure(traces), trained.files.path / "traces.png")
    return found


def _some(trained: TrainedRun, split: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return the first examples of a split, at most `count`, normalised."""
    loader = make_loader(trained.data, split, min(count, len(split)))
    inputs, targets = next(iter(loader.batches(0)))
    return inputs, targets


def _summary(quantity: Quantity) -> dict[str, float | None]:
    """Summarise R-hat and ESS, without the NaN of quantities that never change."""
    r, e = quantity.rhat, quantity.ess
    return {
        "rhat_median": None if r is None else finite(float(np.nanmedian(r))),
        "rhat_worst": None if r is None else finite(float(np.nanmax(r))),
        "ess_median": finite(float(np.nanmedian(e))),
        "ess_least": finite(float(np.nanmin(e))),
    }


def _layers(traces: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Average the traces over the second half of all chains."""
    if not traces:
        return {}
    half = max(row["update"] for row in traces) / 2
    late = [row for row in traces if row["update"] > half]
    names = [n for n in ("temperature", "thermostat", "update_size") if n in late[0]]
    return {
        layer: {name: statistics.fmean(row[name][layer] for row in late) for name in names}
        for layer in late[0][names[0]]
    }
