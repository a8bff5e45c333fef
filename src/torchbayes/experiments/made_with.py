"""What a result was made with, so that it is never taken for one of other settings or another version."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torchbayes._version import __version__
from torchbayes.core.errors import FileError, RunError
from torchbayes.core.reading import read_json
from torchbayes.experiments.settings import SETTINGS, Experiment
from torchbayes.train.run_folder import RunFolder

__all__ = ["check_run", "check_version", "made_with", "read_result"]

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


def check_run(run: RunFolder, experiment: Experiment) -> None:
    """Raise a `RunError` that names the first setting in which a run differs from an experiment.

    A setting that did not exist when the run was begun had its default.
    """
    there = run.read_config()
    # A config.toml also holds other things than settings, such as the training-set size.
    run.check_config({**there, **experiment.settings()}, SETTINGS)


def check_version(run: RunFolder) -> None:
    """Raise a `RunError` if another version made the run: a table must not mix what versions do."""
    began = run.read_config().get("torchbayes", __version__)
    if began != __version__:
        raise RunError(
            f"{run.path} was made by torchbayes {began}, this is {__version__}: choose another folder, "
            "so that all figures of a table are of one version"
        )
