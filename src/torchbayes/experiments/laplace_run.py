"""A Laplace posterior for a finished run of one network, as a run folder of its own."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchbayes import metrics
from torchbayes.core.storage import atomic_path
from torchbayes.data import make_loader, ood_for
from torchbayes.data.transform import Normalise
from torchbayes.experiments.evaluation import evaluate, finite
from torchbayes.experiments.options import option_names
from torchbayes.experiments.saved_predictions import Predictions, RegressionPredictions
from torchbayes.experiments.trained_run import TrainedRun, on_cpu
from torchbayes.laplace import Laplace
from torchbayes.posterior import Point
from torchbayes.posterior.posterior import assign
from torchbayes.predict.results import ClassPredictive, RegressionPredictive
from torchbayes.train.registry import find_method
from torchbayes.train.run_folder import RunError, RunFolder

__all__ = ["laplace_run"]


def laplace_run(
    run: Path, out: Path, *, structure: str = "kronecker", subset: str = "last_layer",
    curvature: str | None = None, prior: float | None = None, evidence: bool = True,
    samples: int | None = None, data_dir: Path | None = None,
    device: torch.device | None = None,
) -> dict[str, dict[str, float | None]]:  # fmt: skip
    """Make the Laplace posterior of a run, write it to a run folder, and score the run before and after.

    Args:
        run: Run folder with one network.
        out: New run folder.
        structure: Structure of the posterior, as for `Laplace`.
        subset: Which weights are uncertain, as for `Laplace`.
        curvature: Curvature, as for `Laplace`.
        prior: The prior's precision; if None the run's own, at its end if it was chosen in training.
        evidence: Whether the evidence chooses another precision.
        samples: Number of draws, by default the run's own setting.
        data_dir: Folder of the data, if not the usual one.
        device: Device to compute on; the CPU if None.

    Returns:
        The scores of the run, of draws from the posterior, and of the linearised prediction.
    """
    trained = TrainedRun(run, data_dir, device=device)
    point = trained.posterior()
    if not isinstance(point, Point):
        raise ValueError(
            f"{run} has a {type(point).__name__} posterior: Laplace takes a run with one network, such as "
            "one of map, mle or swa"
        )
    files, new = RunFolder(out), not out.exists()
    try:
        with files.locked():
            if files.config_file.exists() and not _unfinished(files, run):
                raise RunError(
                    f"{files.path} already holds a run: choose another folder with --out"
                )
            return _made(
                trained, files, samples, structure=structure, subset=subset, curvature=curvature,
                prior=prior, evidence=evidence,
            )  # fmt: skip
    except Exception:
        # Refused before it began.
        if new and out.is_dir() and {file.name for file in out.iterdir()} <= {".lock"}:
            shutil.rmtree(out)
        raise


def _unfinished(files: RunFolder, run: Path) -> bool:
    """Whether this command was stopped here before the scores, which it writes last."""
    scored = (files.path / "scores.json").exists()
    return not scored and files.read_config().get("laplace_of") == run.name


def _made(
    trained: TrainedRun, files: RunFolder, samples: int | None, *, structure: str, subset: str,
    curvature: str | None, prior: float | None, evidence: bool,
) -> dict[str, dict[str, float | None]]:  # fmt: skip
    """Make, write and score the posterior."""
    assign(trained.model, trained.posterior().mean())
    prior = _own_prior(trained) if prior is None else prior
    started = time.monotonic()
    la = Laplace(
        trained.model.eval(), make_loader(trained.data, trained.data.train, 128),
        trained.likelihood(), structure=structure, subset=subset, curvature=curvature, prior=prior,
    )  # fmt: skip
    if evidence:
        la.optimize_prior(noise=False)
        la.narrow()
    seconds = time.monotonic() - started
    _write(trained, la, files, seconds)
    own = {"structure": structure, "subset": subset, "evidence": evidence, "prior": prior}
    if curvature is not None:
        own["curvature"] = curvature
    ours = replace(trained.experiment, **_settings(trained, own))
    config = trained.files.read_config() | ours.settings() | {"laplace_of": trained.files.path.name}
    files.write_config(config)
    before = evaluate(trained)
    made = TrainedRun(files.path, trained.data_dir, data=trained.data, device=trained.device)
    after = evaluate(made, samples)
    return {
        trained.experiment.method: before, "laplace, draws": after,
        "laplace, linearised": _linearised(trained, la),
    }  # fmt: skip


def _own_prior(trained: TrainedRun) -> float:
    """Return the precision at the end of training, which the evidence may have chosen, or else the option."""
    rows = trained.files.read_metrics()
    chosen = rows[-1].get("prior_precision") if rows else None
    for value in (chosen, trained.experiment.options.get("prior")):
        if isinstance(value, int | float) and 0 < value < math.inf:
            return float(value)
    return 1.0


def _settings(trained: TrainedRun, own: dict[str, Any]) -> dict[str, Any]:
    known = option_names(find_method("laplace"))
    kept = {name: value for name, value in trained.experiment.options.items() if name in known}
    return {"method": "laplace", "options": {**kept, **own}}


def _write(trained: TrainedRun, la: Laplace, files: RunFolder, seconds: float) -> None:
    """Write all of a run folder but its settings, which mark it as complete."""
    point = trained.posterior()
    posterior = la.posterior(hold=point.mean())
    if posterior.rest:
        files.write_rest(trained.model, posterior)
    files.write_likelihood(trained.likelihood())
    posterior.save(files.posterior_file)
    rows = trained.files.read_metrics()
    noted = {"laplace_precision": float(la.prior.scalar or 0.0)}
    if rows:
        rows[-1] |= {"seconds": round(rows[-1].get("seconds", 0.0) + seconds, 3), **noted}
    files.keep_metrics(rows)
    for name in (trained.files.inputs_file.name, trained.files.table_file.name, "cost.json"):
        if (trained.files.path / name).exists():
            with atomic_path(files.path / name) as temporary:
                shutil.copyfile(trained.files.path / name, temporary)


def _linearised(trained: TrainedRun, la: Laplace) -> dict[str, float | None]:
    """Score the linearised prediction as `evaluate` scores that of draws."""
    data, generator = trained.data, torch.Generator().manual_seed(0)
    loader = make_loader(data, data.test, 1000)
    targets = torch.cat([batch[1] for batch in loader.batches(0)])
    strange = Normalise(data.mean, data.std)(
        ood_for(data, trained.data_dir).inputs, torch.Generator()
    )
    test, other = (on_cpu(la.predictive(x, generator=generator)) for x in (loader, strange))
    scores: dict[str, float]
    if isinstance(test, ClassPredictive):
        assert isinstance(other, ClassPredictive)
        scores = Predictions.of(test, targets, other).scores()
    else:
        assert isinstance(test, RegressionPredictive)
        assert isinstance(other, RegressionPredictive)
        detected = metrics.auroc(_size(test.epistemic), _size(other.epistemic))
        if data.encoding is not None:
            units = data.encoding.mean, data.encoding.std
            test, targets = test.rescaled(*units), targets.double() * units[1] + units[0]
        scores = RegressionPredictions.of(test, targets).scores() | {"auroc_ood": detected}
    return {name: finite(value) for name, value in scores.items()}


def _size(uncertainty: Tensor) -> Tensor:
    """Return the norm of several targets' uncertainties."""
    size: Tensor = uncertainty.flatten(1).norm(dim=1)
    return size
