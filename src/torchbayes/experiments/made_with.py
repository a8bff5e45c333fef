"""What a result was made with, so that it is never taken for one of other settings or another version."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torchbayes._version import __version__
from torchbayes.core.device import forked_random_numbers
from torchbayes.core.errors import FileError, RunError
from torchbayes.core.reading import read_json
from torchbayes.data import DataSet, OutOfDistribution
from torchbayes.experiments.settings import SETTINGS, Experiment
from torchbayes.train.registry import find_method
from torchbayes.train.run_folder import RunFolder
from torchbayes.train.start import start_of

__all__ = [
    "check_run",
    "check_version",
    "made_of",
    "made_with",
    "read_result",
    "run_config",
    "scored_on",
]

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


def scored_on(data: DataSet, ood: OutOfDistribution | None = None) -> dict[str, str]:
    """Return what scores depend on besides the run: digests of the data and of the other inputs.

    Args:
        data: Data of the run.
        ood: Out-of-distribution inputs, if there are scores of them. A table's are made of its rows.
    """
    found = {"data": data.digest}
    if ood is not None and data.encoding is None:
        found["ood"] = f"{ood.name} {ood.digest}"
    return found


def run_config(experiment: Experiment, data: DataSet) -> dict[str, Any]:
    """Return what config.toml holds: a run on data that have changed since is no longer resumed."""
    return {**experiment.settings(), **_of_data(data)}


def made_of(experiment: Experiment, data: DataSet) -> dict[str, Any]:
    """Return checksums of what an experiment's settings only name: the data and the weights to start from."""
    found = _of_data(data)
    if not experiment.init:
        return found
    several = find_method(experiment.method).starts_apart
    with forked_random_numbers():
        network = experiment.model_factory(data)()
    start = start_of(experiment.init, experiment.reset or None, network, several=several)
    return {**found, **({} if start is None else start.settings())}


def _of_data(data: DataSet) -> dict[str, Any]:
    table = {} if data.encoding is None else {"table_sha256": data.encoding.sha256}
    return {**table, "data_checksum": data.digest}


def check_run(run: RunFolder, experiment: Experiment, data: DataSet) -> None:
    """Raise a `RunError` that names the first setting in which a run differs from an experiment.

    A setting that did not exist when the run was begun had its default.

    Args:
        run: Folder of the run.
        experiment: Settings that it should have.
        data: Data of the experiment: they, or a file of weights to start from, may have changed.
    """
    there = run.read_config()
    now = {**SETTINGS, **experiment.settings(), **made_of(experiment, data)}
    # A config.toml also holds other things than settings, such as the training-set size.
    run.check_config({**there, **now}, {**SETTINGS, "data_checksum": data.digest})


def check_version(run: RunFolder) -> None:
    """Raise a `RunError` if another version made the run: a table must not mix what versions do."""
    began = run.read_config().get("torchbayes", __version__)
    if began != __version__:
        raise RunError(
            f"{run.path} was made by torchbayes {began}, this is {__version__}: choose another folder, "
            "so that all figures of a table are of one version"
        )
