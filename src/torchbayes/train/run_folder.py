"""A run folder: what a training run writes to disk, in such a way that a kill at any moment loses little.

config.toml                       the settings; what a resumed run is compared with
metrics.jsonl                     one line per epoch
traces.jsonl                      periodic diagnostics of a sampler's chains
checkpoint.safetensors            everything needed to continue, with the generation before it beside it
posterior.safetensors             the result
rest.safetensors                  the weights that were frozen, if any: the posterior does not hold them
likelihood.safetensors            what the outputs mean, with the noise level that was learned
inputs.json                       how inputs are normalised, and the names of the classes
table.json                        for a table: how its columns are encoded
calibration.json                  corrections that were fitted after training, if any

Every file carries a checksum of its content. As long as a run lasts, the folder is locked against others.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import nn

from torchbayes._version import __version__
from torchbayes.core.errors import FileError, RunError, WriteError
from torchbayes.core.locks import folder_lock
from torchbayes.core.names import named_weights
from torchbayes.core.reading import (
    is_number,
    json_line,
    json_lines,
    read_json,
    read_json_lines,
    read_toml,
    toml_text,
)
from torchbayes.core.storage import append_line, remove_strays, write_json, write_text
from torchbayes.data.preprocessing import Preprocessing
from torchbayes.likelihood import Likelihood, as_likelihood
from torchbayes.posterior import Point, Posterior, load, snapshot
from torchbayes.posterior.posterior import assign
from torchbayes.posthoc import Calibration
from torchbayes.train.checkpoint import Checkpoint
from torchbayes.train.likelihood_file import give, read_likelihood, write_likelihood
from torchbayes.train.traces import are_traces

__all__ = ["RunError", "RunFolder"]

_LOG = logging.getLogger("torchbayes")

# What a config.toml says about the run besides its settings; a resumed run takes over its defaults and what
# it has chosen.
_ABOUT = ("chosen", "commit", "defaults", "processes", "torch", "torchbayes")

# What digests are of, in words.
_DIGESTS = {
    "data_checksum": "other data",
    "network_checksum": "another network",
    "teacher_checksum": "another teacher",
}


def _without_none(value: Any) -> Any:
    """Drop unset values, because TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


def _with_versions(config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.toml holds; settings that were read from one have the versions of their run."""
    own = {} if "torchbayes" in config else {"torchbayes": __version__, "torch": torch.__version__}
    return {**own, **_without_none(config)}


def _is_epoch(row: Mapping[str, Any]) -> bool:
    """Whether a row of metrics.jsonl holds single values, and a time that is a number, if it has one."""
    single = not any(isinstance(value, (dict, list)) for value in row.values())
    return single and is_number(row.get("seconds", 0.0))


class RunFolder:
    """The files of one run.

    Args:
        path: The folder; created if necessary.
        rank: Under torchrun, whose checkpoint this is, for methods that train members of their own on
            every process; otherwise 0.
    """

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        self.path = Path(path)
        suffix = f"-rank{rank}" if rank else ""
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / f"metrics{suffix}.jsonl"
        self.traces_file = self.path / f"traces{suffix}.jsonl"
        self.checkpoint = Checkpoint(self.path / f"checkpoint{suffix}.safetensors")
        self.posterior_file = self.path / "posterior.safetensors"
        self.rest_file = self.path / "rest.safetensors"
        self.likelihood_file = self.path / "likelihood.safetensors"
        self.inputs_file = self.path / "inputs.json"
        self.table_file = self.path / "table.json"
        self.calibration_file = self.path / "calibration.json"

    def prepare(self) -> None:
        """Create the folder."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path} ({error.strerror or error}): choose another output folder"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, keep others out of it for the time of the block, and remove what kills left."""
        self.prepare()
        with folder_lock(self.path):
            remove_strays(self.path)
            yield

    @property
    def _remedy(self) -> str:
        return f"start the run in {self.path} again with resume=True, which writes it anew"

    def check_not_lost(self) -> None:
        """Raise a `RunError` if there is a run without its settings: nobody could tell what made it."""
        if self.config_file.exists():
            return
        left = [
            *self.path.glob("checkpoint*.safetensors"),
            *self.path.glob("posterior.safetensors"),
        ]
        if left:
            raise RunError(
                f"{self.path} has a {min(left).name} but no config.toml, which says what made it: restore "
                "config.toml, or remove the folder to train the run again"
            )

    def read_config(self) -> dict[str, Any]:
        """Return the settings that the run was started with."""
        if not self.config_file.exists():
            raise RunError(f"{self.path} is not a run folder: it has no config.toml")
        remedy = "restore it or start the run again in another folder"
        config = read_toml(self.config_file, remedy, "torchbayes")
        if not config:
            raise RunError(f"{self.config_file} is empty: {remedy}")
        return config

    def write_config(self, config: dict[str, Any]) -> None:
        """Save the settings, and the versions that they are for."""
        write_text(self.config_file, toml_text(tomli_w.dumps(_with_versions(config))))

    def identity(self) -> str:
        """Return a digest of the settings and the versions that the run was made with."""
        return self.identity_of(self.read_config())

    @staticmethod
    def identity_of(config: dict[str, Any]) -> str:
        """Return the digest that a run has whose settings are written with `write_config`."""
        text = json.dumps(_with_versions(config), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check_config(
        self, config: dict[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Raise a `RunError` that names the first setting in which the folder's run differs.

        Args:
            config: Settings to compare with.
            defaults: What a setting was before it existed: an older config.toml does not have it.
        """
        there, here = self.read_config(), _without_none(config)
        before = _without_none({} if defaults is None else dict(defaults))
        for key in sorted(there.keys() | here.keys(), key=lambda key: (key in _DIGESTS, key)):
            if key in _ABOUT:
                continue
            was, now = there.get(key, before.get(key)), here.get(key, before.get(key))
            if was == now or (
                key == "network_checksum" and there.get("torch") != torch.__version__
            ):
                continue  # how a network prints itself is up to torch
            if key == "init" and was and now and "init_checksum" in there.keys() & here.keys():
                continue  # another path to the file: what is in it is compared by its checksum
            if key in _DIGESTS:
                raise RunError(
                    f"{self.path} holds a run with {_DIGESTS[key]} ({key} = {was!r}, not {now!r}): "
                    "resume it with its own or choose another folder"
                )
            raise RunError(
                f"{self.path} holds a run with {key} = {was!r}, not {now!r}: "
                "resume it with its own settings or choose another folder"
            )

    def processes(self) -> int | None:
        """Return how many processes began the run, each with its own chains or members, or None."""
        if not self.config_file.exists():
            return None
        known = self.read_config().get("processes")
        if isinstance(known, int) and known > 0:
            return known
        # One, or an older version has not written it down.
        count = 1
        while (self.path / f"checkpoint-rank{count}.safetensors").exists():
            count += 1
        return count

    def note_version(self) -> None:
        """Say so if another version of torchbayes began the run: bit-equality holds within a version."""
        began = self.read_config().get("torchbayes")
        if began not in (None, __version__):
            _LOG.warning(
                "%s was begun by torchbayes %s and goes on with %s", self.path, began, __version__
            )

    def write_checkpoint(self, state: dict[str, Any]) -> None:
        """Add a generation of the checkpoint."""
        if not self.config_file.exists():
            raise WriteError(
                f"{self.path} has lost its config.toml while the run went on: do not remove a folder that is "
                "being written to"
            )
        self.checkpoint.write(state)

    def write_rest(self, model: nn.Module, posterior: Posterior) -> None:
        """Save the weights of the network that the posterior does not hold."""
        held = posterior._shapes()
        rest = [name for name in named_weights(model) if name not in held]
        Point(snapshot(model, rest), model_name=posterior.model_name).save(self.rest_file)

    def read_rest(self, model: nn.Module) -> None:
        """Give the network the weights that the posterior does not hold, if there are any."""
        if self.rest_file.exists():
            assign(model, load(self.rest_file).mean())

    def write_likelihood(self, likelihood: Likelihood) -> None:
        """Save the likelihood, with what it has learned."""
        write_likelihood(self.likelihood_file, likelihood)

    def read_likelihood(self, given: Any = None) -> Likelihood:
        """Return the likelihood with what it has learned.

        Args:
            given: The likelihood, for one that a file cannot hold, and for a run of an older version: it
                receives what was learned.
        """
        if self.likelihood_file.exists():
            return read_likelihood(self.likelihood_file, given)
        if given is None:
            raise RunError(
                f"{self.path} was written by an older torchbayes, which did not keep the likelihood: pass "
                "likelihood="
            )
        likelihood = as_likelihood(given)
        if not any(p.requires_grad for p in likelihood.parameters()):
            return likelihood
        state = self.checkpoint.read_newest()
        if state is None:
            raise RunError(
                f"{self.checkpoint.newest} is missing, which holds the learned noise level: train the run "
                "again"
            )
        return give(likelihood, state["likelihood"], str(self.checkpoint.newest))

    def read_preprocessing(self) -> Preprocessing:
        """Return what happens to inputs before the network sees them, as far as the folder says so."""
        return Preprocessing.load(self.inputs_file, self.table_file, self._remedy)

    def write_calibration(self, figures: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Save the figures of a calibration.

        Args:
            figures: Those of a `Calibration`.
            made: What they were made with: at least `identity()` as `run`.
        """
        write_json(self.calibration_file, {**figures, "made_with": dict(made)})

    def read_calibration(self) -> Calibration | None:
        """Return the calibration, or None if there is none, or it is of other settings than the run."""
        if not self.calibration_file.exists():
            return None
        remedy = "calibrate the run again, or delete the file"
        content = read_json(self.calibration_file, remedy)
        made = content.pop("made_with", None) if isinstance(content, dict) else None
        try:
            calibration = Calibration.of(content)
        except (ValueError, AttributeError) as error:
            raise FileError(f"{self.calibration_file} is damaged: {remedy}") from error
        if isinstance(made, dict) and made.get("run") not in (None, self.identity()):
            _LOG.warning(
                "%s was made with other settings than the run and is not used: %s",
                self.calibration_file, remedy,
            )  # fmt: skip
            return None
        return calibration

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        append_line(self.metrics_file, json_line(row))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl.

        Raises:
            FileError: If a row is damaged, or one is missing that the checkpoint counts.
        """
        rows = read_json_lines(self.metrics_file, self._remedy)
        odd = next((n for n, row in enumerate(rows, 1) if not _is_epoch(row)), None)
        if odd is not None:
            raise FileError(
                f"{self.metrics_file} is damaged, line {odd} is not that of an epoch: {self._remedy}"
            )
        counted = self.checkpoint.rows()
        if counted is None:
            return rows
        epochs = [row.get("epoch") for row in rows]
        if len(rows) < counted or epochs != list(range(1, len(rows) + 1)):
            raise FileError(
                f"{self.metrics_file} is damaged, its {len(rows)} rows are not those of epochs 1, 2, … "
                f"to at least {counted}: {self._remedy}"
            )
        return rows

    def write_traces(self, rows: list[dict[str, Any]]) -> None:
        """Save a sampler's traces, if there are any."""
        if rows:
            write_text(self.traces_file, json_lines(rows))

    def read_traces(self) -> list[dict[str, Any]]:
        """Return the traces of all processes, ordered by chain and update."""
        files = sorted(self.path.glob("traces*.jsonl"))
        rows = [row for file in files for row in read_json_lines(file, self._remedy, whole=True)]
        if not are_traces(rows):
            raise FileError(
                f"{self.traces_file} is damaged, its lines are not those of one run's traces: {self._remedy}"
            )
        return sorted(rows, key=lambda row: (row["chain"], row["update"]))

    def keep_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Write metrics.jsonl anew, as it was at the checkpoint from which the run continues."""
        write_text(self.metrics_file, "".join(json_line(row) + "\n" for row in rows))
