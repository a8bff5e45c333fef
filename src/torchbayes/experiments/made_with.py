"""What a result was made with, so that it is never taken for one of other settings or another version."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from torchbayes._version import __version__
from torchbayes.core.errors import FileError, RunError
from torchbayes.core.reading import read_json
from torchbayes.data import DataSet
from torchbayes.experiments.settings import SETTINGS, Experiment
from torchbayes.train.registry import find_method
from torchbayes.train.run_folder import RunFolder
from torchbayes.train.start import start_of

__all__ = ["check_run", "check_version", "made_with", "read_result", "run_config"]

_LOG = logging.getLogger("torchbayes")


def made_with(run: RunFolder, **how: Any) -> dict[str, Any]:
    """Return what a result depends on: the version, the run's settings as a digest, and the arguments.

    Args:
        run: Folder of the run that the result is of.
        **how: Arguments that the result depends on, such as the number of draws.
    """
    return {"torchbayes": __version__, "run": run.identity(), **how}


def read_result(file: Path, made: dict[str, Any]) -> dict[str, Any] | None:
    """Return a result that can be used again, or None if it has to be made (again).

    Args:
        file: JSON file with an entry `made_with`.
        made: What the result should have been made with.
    """
    if not file.exists():
        return None
    try:
        content = read_json(file, "it is made again")
    except FileError as error:
        _LOG.warning("%s", error)
        return None
    if not isinstance(content, dict) or content.pop("made_with", None) != made:
        return None
    return content


def run_config(experiment: Experiment, data: DataSet) -> dict[str, Any]:
    """Return what config.toml holds: a table that has changed since is then no longer resumed."""
    settings = experiment.settings()
    return settings if data.encoding is None else settings | {"table_sha256": data.encoding.sha256}


def check_run(run: RunFolder, experiment: Experiment, data: DataSet) -> None:
    """Raise a `RunError` that names the first setting in which a run differs from an experiment.

    A setting that did not exist when the run was begun had its default.

    Args:
        run: Folder of the run.
        experiment: Settings that it should have.
        data: Data of the experiment: a table or a file of weights to start from may have changed.
    """
    there = run.read_config()
    now = {**SETTINGS, **run_config(experiment, data)}
    if experiment.init:
        several = find_method(experiment.method).starts_apart
        with torch.random.fork_rng():
            network = experiment.model_factory(data)()
        start = start_of(experiment.init, experiment.reset or None, network, several=several)
        now |= {} if start is None else start.settings()
    # A config.toml also holds other things than settings, such as the training-set size.
    run.check_config({**there, **now}, SETTINGS)


def check_version(run: RunFolder) -> None:
    """Raise a `RunError` if another version made the run: a table must not mix what versions do."""
    began = run.read_config().get("torchbayes", __version__)
    if began != __version__:
        raise RunError(
            f"{run.path} was made by torchbayes {began}, this is {__version__}: choose another folder, "
            "so that all figures of a table are of one version"
        )
