"""A run folder: what a training run writes to disk, in such a way that a kill at any moment loses little.

config.toml             the settings; what `--resume` compares with
metrics.jsonl           one line per epoch
traces.jsonl            periodic diagnostics of a sampler's chains
checkpoint.pt           everything needed to continue, read with weights_only=True
posterior.safetensors   the result
rest.safetensors        the weights that were frozen, if any: the posterior does not hold them
table.json              for a table: how its columns are encoded
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import nn

from torchbayes.core.names import named_weights
from torchbayes.core.storage import atomic_path, write_text
from torchbayes.posterior import Point, Posterior, load, snapshot
from torchbayes.posterior.posterior import assign

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["CHECKPOINT_VERSION", "RunError", "RunFolder", "read_toml"]

CHECKPOINT_VERSION = 3
"""Raised when the state of a method changes, so that a checkpoint from before cannot be continued."""


class RunError(ValueError):
    """A run folder cannot be used as requested."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say in one sentence what is wrong with it."""
    try:
        with path.open("rb") as file:
            content: dict[str, Any] = tomllib.load(file)
            return content
    except FileNotFoundError as error:
        raise RunError(f"there is no file {path}: check the path") from error
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{path} is not valid TOML: {error}") from error


def _without_none(value: Any) -> Any:
    """Drop unset values, because TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


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
        self.checkpoint_file = self.path / f"checkpoint{suffix}.pt"
        self.posterior_file = self.path / "posterior.safetensors"
        self.rest_file = self.path / "rest.safetensors"
        self.table_file = self.path / "table.json"

    def prepare(self) -> None:
        """Create the folder and check that it is writable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink(missing_ok=True)
            for left_by_a_kill in self.path.glob(f".{self.checkpoint_file.name}.*.part"):
                left_by_a_kill.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path} ({error.strerror or error}): choose another output folder"
            ) from error

    def read_config(self) -> dict[str, Any]:
        """Return the settings that the run was started with."""
        if not self.config_file.exists():
            raise RunError(f"{self.path} is not a run folder: it has no config.toml")
        return read_toml(self.config_file)

    def write_config(self, config: dict[str, Any]) -> None:
        """Save the settings."""
        write_text(self.config_file, tomli_w.dumps(_without_none(config)))

    def check_config(self, config: dict[str, Any]) -> None:
        """Raise a `RunError` that names the first setting in which the folder's run differs."""
        there, here = self.read_config(), _without_none(config)
        for key in sorted(there.keys() | here.keys()):
            if there.get(key) != here.get(key):
                raise RunError(
                    f"{self.path} holds a run with {key} = {there.get(key)!r}, not {here.get(key)!r}: "
                    "resume it with its own settings or choose another folder"
                )

    def write_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint atomically."""
        with atomic_path(self.checkpoint_file) as temporary:
            torch.save({"version": CHECKPOINT_VERSION, **state}, temporary)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint, or None if there is none yet. Never runs code from the file."""
        if not self.checkpoint_file.exists():
            return None
        try:
            state = torch.load(self.checkpoint_file, map_location="cpu", weights_only=True)
            version = state["version"]
        except (
            RuntimeError,
            OSError,
            KeyError,
            TypeError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            raise RunError(
                f"{self.checkpoint_file} is damaged or not a checkpoint: delete it to start again"
            ) from error
        if version > CHECKPOINT_VERSION:
            raise RunError(
                f"{self.checkpoint_file} was written by a newer torchbayes: upgrade torchbayes"
            )
        assert isinstance(state, dict)
        return state

    def write_rest(self, model: nn.Module, posterior: Posterior) -> None:
        """Save the weights of the network that the posterior does not hold."""
        held = posterior._shapes()
        rest = [name for name in named_weights(model) if name not in held]
        Point(snapshot(model, rest), model_name=posterior.model_name).save(self.rest_file)

    def read_rest(self, model: nn.Module) -> None:
        """Give the network the weights that the posterior does not hold, if there are any."""
        if self.rest_file.exists():
            assign(model, load(self.rest_file).mean())

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self, rows: int | None = None) -> list[dict[str, Any]]:
        """Return the first `rows` lines of metrics.jsonl, or all complete ones."""
        if not self.metrics_file.exists():
            return []
        result: list[dict[str, Any]] = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines()[:rows]:
            try:
                result.append(json.loads(line))
            except json.JSONDecodeError:
                break  # the line that a kill cut short
        return result

    def write_traces(self, rows: list[dict[str, Any]]) -> None:
        """Save a sampler's traces, if there are any."""
        if rows:
            write_text(self.traces_file, "".join(json.dumps(row) + "\n" for row in rows))

    def read_traces(self) -> list[dict[str, Any]]:
        """Return the traces of all processes, ordered by chain and update."""
        rows = [
            json.loads(line)
            for file in sorted(self.path.glob("traces*.jsonl"))
            for line in file.read_text(encoding="utf-8").splitlines()
        ]
        return sorted(rows, key=lambda row: (row["chain"], row["update"]))

    def keep_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Drop what was logged after the checkpoint from which the run continues."""
        write_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))
