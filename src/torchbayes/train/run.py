"""A finished run: predictions, corrections, and a folder from which it can be loaded again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchbayes.core.batch import split_batch
from torchbayes.core.device import forked_random_numbers
from torchbayes.core.errors import FileError, RunError
from torchbayes.core.names import unwrapped
from torchbayes.core.outputs import Output
from torchbayes.data.preprocessing import Preprocessing
from torchbayes.likelihood import Likelihood
from torchbayes.models import build_model
from torchbayes.posterior import Posterior, load
from torchbayes.posterior.posterior import assign
from torchbayes.posthoc import Calibration, calibrate
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import Predictive, RegressionPredictive
from torchbayes.train.data import as_loader
from torchbayes.train.run_folder import RunFolder

__all__ = ["Run", "load_run"]

_FUNCTION = "output_is_function"


@dataclass(repr=False)
class Run:
    """A finished training run.

    Attributes:
        model: The network that was trained, with the weights of the end of training: a copy of the one that
            was passed to `fit`, that one itself with `in_place=True`, or the one that a function made. The
            result is `posterior`. Of a loaded run it has the posterior's mean weights.
        posterior: What was learned about the weights.
        history: One dictionary of metrics per epoch.
        likelihood: Meaning of the network's outputs.
        method: Name of the method.
        seconds: Training time, over all resumed parts.
        output: Where the likelihood's tensor is in what the network returns, as it was given to `fit`.
        settings: What the run was trained with, as its config.toml holds it.
        preprocessing: What happens to inputs before the network sees them, as far as it is known.
        calibration: Corrections that `predict` applies, or None; see `calibrate`.
        folder: The folder that the run was trained in, saved to or loaded from, or None.
    """

    model: nn.Module
    posterior: Posterior
    history: list[dict[str, Any]]
    likelihood: Likelihood
    method: str
    seconds: float
    output: Output = None
    settings: dict[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    calibration: Calibration | None = None
    folder: Path | None = None

    def __repr__(self) -> str:
        epochs = len(self.history)
        return (
            f"Run({self.method}, {epochs} epoch{'s' * (epochs != 1)} in {self.seconds:.3g} s: "
            f"{self.posterior!r}, {type(self.likelihood).__name__}"
            f"{'' if self.calibration is None else ', calibrated'})"
        )

    def predict(
        self, inputs: Any, samples: int = 32, *, calibrated: bool = True, **kwargs: Any
    ) -> Predictive:
        """Predict with the weights averaged out.

        Inputs are those that `fit` was given: if it normalised them (`transform=Normalise(…)`), so does this.
        A run of the command line on images also takes image files, and one on a table a CSV file or a data
        frame (tensors are encoded rows), and predicts in the target's own units.

        Args:
            inputs: What to predict; see `torchbayes.predictive` and `torchbayes.data.Preprocessing`.
            samples: Number of draws.
            calibrated: Apply the run's temperature, if it has been calibrated.
            **kwargs: Further arguments of `torchbayes.predictive`, such as `generator`.
        """
        # The methods have estimated batch-norm statistics under their draws, or of their mean.
        known = {"likelihood": self.likelihood, "output": self.output, "recalibrate": False}
        ready = self.preprocessing(inputs)
        result = predictive(self.model, self.posterior, ready, samples, **(known | kwargs))
        table = self.preprocessing.table
        if table is not None and isinstance(result, RegressionPredictive):
            result = result.rescaled(table.mean, table.std)
        return self.calibration(result) if calibrated and self.calibration is not None else result

    def calibrate(
        self, held_out: Any, targets: Any = None, *, coverages: Sequence[float] = (0.8, 0.9, 0.95),
        risks: Sequence[float] = (0.01, 0.02, 0.05), samples: int = 32,
        generator: torch.Generator | None = None,
    ) -> Calibration:  # fmt: skip
        """Fit temperature, prediction sets and abstention, or a regression's intervals, and keep them.

        Half of the data, drawn with seed 0, is fitted to and the other half scored. A temperature that makes
        the NLL worse there is not used, with a warning.

        Args:
            held_out: Data that were not trained on, in any of the forms that `fit` takes.
            targets: The targets, if `held_out` is the inputs alone.
            coverages: Target coverages of prediction sets and intervals.
            risks: Target risks of abstention.
            samples: Number of draws.
            generator: Source of the draws; torch's global one if None.

        Example:
            >>> import torch, torchbayes as tb
            >>> x = torch.randn(300, 2)
            >>> y = (x[:, 0] + 0.5 * torch.randn(300) > 0).long()
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
            >>> run = tb.fit(net, (x[:100], y[:100]), "mle", epochs=50, lr=0.03, progress=False)
            >>> rules = run.calibrate(x[100:], y[100:])
            >>> raw = run.predict(x, calibrated=False)
            >>> bool(run.predict(x).confidence.mean() < raw.confidence.mean())
            True
            >>> rules.sets[0.9](raw).shape
            torch.Size([300, 2])
        """
        data = held_out if targets is None else (held_out, targets)
        loader = as_loader(data, 512, 0, None, (0, 1), shuffle=False)
        labels = [split_batch(batch)[1] for batch in loader.batches(0)]
        if not labels or any(label is None for label in labels):
            raise ValueError(
                "the held-out data have no targets: give them too, as in calibrate(inputs, targets)"
            )
        raw = self.predict(loader, samples, calibrated=False, generator=generator)
        found = calibrate(
            raw, torch.cat([torch.as_tensor(label) for label in labels]),
            coverages=coverages, risks=risks,
            ignore_index=getattr(self.likelihood, "ignore_index", None),
        )  # fmt: skip
        about = {"fitted_on": "half of the held-out data", "scored_on": "the other half"}
        self.calibration = Calibration.of({**about, **found.figures})
        if found.warning is not None:
            warnings.warn(found.warning, stacklevel=2)
        return self.calibration

    def save(self, folder: str | Path) -> None:
        """Write the run to a folder, from which `load_run` and the command line can read it.

        The folder has the files of one that `fit(folder=…)` writes, but no checkpoint: the run can be used,
        not continued. See docs/after-training.md for what it holds.

        Args:
            folder: A folder without a run, or the run's own.

        Raises:
            RunError: If there is another run in the folder.
        """
        files = RunFolder(folder)
        with files.locked():
            own = self.folder is not None and self.folder.resolve() == files.path.resolve()
            if files.config_file.exists() and not own:
                raise RunError(f"{folder} already holds a run: choose another folder")
            files.keep_metrics(self.history)
            write_result(self, files)
            if self.calibration is not None:
                files.write_calibration(
                    self.calibration.figures, {"run": files.identity_of(self.settings)}
                )
            if not own:
                files.write_config(self.settings)  # the last: a folder without it is no run
        self.folder = files.path


def write_result(run: Run, files: RunFolder) -> None:
    """Write what a run has learned: everything but its settings, its history and its calibration."""
    if run.posterior.rest:
        files.write_rest(run.model, run.posterior)
    files.write_likelihood(run.likelihood)
    run.preprocessing.save(files.inputs_file, files.table_file)
    run.posterior.save(files.posterior_file)


def output_settings(output: Output) -> dict[str, Any]:
    """Return what config.toml holds about `output`: of a function, its name."""
    if callable(output):
        return {"output": getattr(output, "__name__", repr(output)), _FUNCTION: True}
    return {"output": output}


def load_run(
    folder: str | Path, model: nn.Module | Callable[[], nn.Module] | None = None, *,
    likelihood: Any = None, output: Output = None,
) -> Run:  # fmt: skip
    """Load a run that `Run.save`, `fit(folder=…)` or `torchbayes train` has written.

    Nothing is unpickled and nothing in the folder runs code: the network comes from you, or is one of
    torchbayes' own.

    Args:
        folder: The run folder.
        model: The network that the run was trained with, or a function that makes it; its weights do not
            matter, and it is not changed. None for a run of the command line, which names its network.
        likelihood: For a run that was trained with a likelihood of its own, which a folder cannot hold.
        output: For a run that was trained with a function as `output`.

    Raises:
        RunError: If the folder has no finished run, or does not hold all that is needed.

    Example:
        >>> import tempfile, torch, torchbayes as tb
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1)
        >>> run = tb.fit(net, (x, 2 * x), "map", epochs=5, lr=0.1, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run.save(f"{folder}/line")
        ...     again = tb.load_run(f"{folder}/line", torch.nn.Linear(1, 1))
        >>> torch.equal(run.predict(x).quantile(0.9), again.predict(x).quantile(0.9))
        True
    """
    files = RunFolder(folder)
    settings = files.read_config()
    if not files.posterior_file.exists():
        raise RunError(f"{folder} has no posterior yet: finish the run with resume=True")
    preprocessing = files.read_preprocessing()
    network = _network(files, settings, model)
    files.read_rest(network)
    posterior = load(files.posterior_file, network)
    assign(network, posterior.mean())
    history = files.read_metrics()
    if preprocessing.unknown:
        warnings.warn(
            f"the run was trained with transform={preprocessing.unknown}, which a folder cannot hold: apply "
            "it to the inputs before you predict them",
            stacklevel=2,
        )
    place = next((p.device for p in network.parameters()), torch.device("cpu"))
    return Run(
        network,
        posterior,
        history,
        files.read_likelihood(likelihood).to(place),
        str(settings.get("method", "")),
        float(history[-1].get("seconds", 0.0)) if history else 0.0,
        _output(files, settings, output),
        settings,
        preprocessing,
        files.read_calibration(),
        files.path,
    )


def _network(
    files: RunFolder, settings: dict[str, Any], model: nn.Module | Callable[[], nn.Module] | None
) -> nn.Module:
    if isinstance(model, nn.Module):
        try:
            return copy.deepcopy(unwrapped(model))
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be copied ({str(error).splitlines()[0]}): pass a function "
                "that makes it"
            ) from error
    if model is not None:
        return model()
    build = settings.get("build")
    if not isinstance(build, dict):
        name = settings.get("network", "network")
        raise RunError(
            f"{files.path} does not say how its {name} is built: pass it, as in load_run(folder, model)"
        )
    try:
        with forked_random_numbers():
            return build_model(**build)
    except (TypeError, ValueError) as error:
        raise FileError(
            f"{files.config_file} names a network that this torchbayes cannot build ({error}): pass the model"
        ) from error


def _output(files: RunFolder, settings: dict[str, Any], given: Output) -> Output:
    kept = settings.get("output")
    if given is not None:
        return given
    if settings.get(_FUNCTION):
        raise RunError(
            f"{files.path} was trained with the function {kept!r} as output, which a folder cannot hold: "
            "pass output="
        )
    return kept if isinstance(kept, (str, int)) else None
