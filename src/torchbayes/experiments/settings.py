"""Settings of one training run, as stored in recipes and run folders.

A file has a flat table of settings, `SETTINGS`; here the schedule is a single `Schedule`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchbayes.core.device import forked_random_numbers
from torchbayes.data import DataSet, TableEncoding, load_data
from torchbayes.data.dataset import hold_out
from torchbayes.data.transform import PadCropFlip
from torchbayes.experiments.options import check_spelling, translated
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood
from torchbayes.models import build_model
from torchbayes.train.registry import find_method
from torchbayes.train.schedule import Schedule

__all__ = ["SETTINGS", "Experiment", "check_keys"]

_NOISES = ("learned", "fixed", "predicted")
# The usual network for a data set or a kind of them, with its options; for all others, LeNet-5.
_USUAL_MODEL: dict[str, tuple[str, dict[str, Any]]] = {
    "table": ("mlp", {"hidden": [64, 64]}),
    "uci": ("mlp", {"hidden": [50]}),
    "digits": ("mlp", {"hidden": [200, 200]}),
    "moons": ("mlp", {"hidden": [50, 50]}),
    "bbb-curve": ("mlp", {"hidden": [100, 100]}),
}
_TABLE_OPTIONS: dict[str, type | tuple[type, ...]] = {
    "target": (str, int),
    "task": str,
    "drop": (list, tuple),
    "split": (str, int),
    "test_share": float,
}


@dataclass(frozen=True)
class Experiment:
    """Every setting of a run; the defaults suit `digits`.

    Args:
        data: Name of a data set, or a folder of images.
        model: Name of a network; empty for the data set's default.
        method: Name of a method.
        epochs: Passes through the training set.
        batch_size: Examples per update.
        samples: Posterior draws to predict with.
        seed: Random seed.
        validation: Share of the training set to hold out and score after every epoch.
        examples: Number of training examples, drawn at random; 0 for all.
        augment: Use the data set's usual augmentation.
        augment_shift: Pixels by which it moves images at most; 0 for as many as usual.
        schedule: Learning-rate schedule. In a file its name is `schedule`, and its other arguments are
            separate settings.
        clip_norm: Largest gradient norm; 0 for no limit.
        amp: bfloat16 or float16 for mixed precision; empty for none.
        memory_format: auto, channels_last or contiguous for images; empty to leave them as they are.
        compile: Back end of torch.compile, such as inductor; empty for none.
        accumulate: Gradient-accumulation steps.
        noise: Gaussian noise of a regression's targets: learned (one level), fixed, or predicted by the
            network for every input.
        noise_std: Standard deviation of fixed noise, or the initial value of learned noise.
        init: Safetensors file of weights to start from, or several, one for each member of an ensemble;
            empty for random ones. In a recipe's row also `row:NAME`, the network of another row above with
            the same seed.
        reset: Weights or modules that start from new random weights in spite of `init`.
        model_options: Options of the network.
        table: For a table: its target, task, drop, split and test_share, as for `load_data`; with `split`
            "seed" every seed has test rows of its own.
        options: Options of the method.
    """

    data: str = "digits"
    model: str = ""
    method: str = "map"
    epochs: int = 30
    batch_size: int = 64
    samples: int = 32
    seed: int = 0
    validation: float = 0.0
    examples: int = 0
    augment: bool = False
    augment_shift: int = 0
    schedule: Schedule = field(default_factory=Schedule)
    clip_norm: float = 0.0
    amp: str = ""
    memory_format: str = ""
    compile: str = ""
    accumulate: int = 1
    noise: str = "learned"
    noise_std: float = 1.0
    init: str | tuple[str, ...] = ""
    reset: tuple[str, ...] = ()
    model_options: dict[str, Any] = field(default_factory=dict)
    table: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], where: str) -> Experiment:
        """Build an experiment from a flat table of settings, and check it.

        Args:
            settings: Some of `SETTINGS`.
            where: Name of the table in messages.

        Example:
            >>> Experiment.from_settings({"schedule": "cyclic", "cycles": 4}, "here").schedule.cycles
            4
        """
        check_keys(settings, SETTINGS, where)
        own: dict[str, Any] = {}
        schedule_args: dict[str, Any] = {}
        for key, value in settings.items():
            default = SETTINGS[key]
            if isinstance(default, float) and type(value) is int:
                value = float(value)
            if isinstance(default, tuple) and isinstance(value, list):
                value = tuple(value)
            if key == "init" and isinstance(value, list | tuple) and all(
                isinstance(file, str) for file in value
            ):  # fmt: skip
                value = value[0] if len(value) == 1 else tuple(value)
            elif type(value) is not type(default):
                raise ValueError(
                    f"{where}: {key} is {value!r}, expected a value such as {default!r}"
                )
            if key == "schedule":
                schedule_args["name"] = value
            else:
                (schedule_args if key in _SCHEDULE_KEYS else own)[key] = value
        return cls(**own, schedule=Schedule(**schedule_args)).check()

    def settings(self) -> dict[str, Any]:
        """Return the flat table that `from_settings` takes."""
        flat: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            flat |= self.schedule.settings() if name == "schedule" else {name: value}
        # What an older version did not have is mentioned if it is set, so that its runs can be resumed.
        return {name: value for name, value in flat.items() if value or name not in _LATER}

    def check(self) -> Experiment:
        """Return the experiment, or raise a `ValueError` for an invalid name or number."""
        check_spelling(find_method(self.method), self.options)
        for name in ("epochs", "batch_size", "samples", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: expected a whole number of at least 1"
                )
        if not 0 <= self.validation < 1:
            raise ValueError(
                f"validation is {self.validation:g}: expected a share from 0 to below 1"
            )
        if self.augment_shift and not self.augment:
            raise ValueError(
                f"augment_shift is {self.augment_shift}, but nothing is augmented: set augment too"
            )
        if self.examples < 0:
            raise ValueError(
                f"examples is {self.examples}: expected the number to train on, or 0 for all"
            )
        if self.noise not in _NOISES:
            raise ValueError(f"noise is {self.noise!r}: expected {' or '.join(_NOISES)}")
        if self.reset and not self.init:
            raise ValueError(
                f"reset is {list(self.reset)}, but all weights start at random: give the file that the others"
                " start from with --init"
            )
        self._noise()
        check_keys(self.table, _TABLE_OPTIONS, "[table]")
        for name, value in self.table.items():
            if not isinstance(value, _TABLE_OPTIONS[name]):
                raise ValueError(f"[table]: {name} is {value!r}, which is not of the right type")
        return self

    def _noise(self) -> GaussianNoise:
        return GaussianNoise(
            self.noise_std, learned=self.noise == "learned", predicted=self.noise == "predicted"
        )

    def likelihood(self, data: DataSet) -> Likelihood:
        """Return the likelihood: categorical if `data` has classes, else Gaussian noise."""
        return Categorical() if data.classes else self._noise()

    @property
    def is_table(self) -> bool:
        """Whether the data are a table."""
        return self.data.startswith(("table:", "uci:"))

    @property
    def network(self) -> str:
        """Name of the network, by default the data set's usual one."""
        return self.model if self.model else self._usual[0]

    @property
    def _usual(self) -> tuple[str, dict[str, Any]]:
        kind = self.data.partition(":")[0]
        return _USUAL_MODEL.get(self.data) or _USUAL_MODEL.get(kind, ("lenet5", {}))

    def build(self, data: DataSet) -> dict[str, Any]:
        """Return what `torchbayes.models.build_model` takes to build the network for `data`."""
        options = {**({} if self.model else self._usual[1]), **self.model_options}
        targets = data.num_targets * (2 if self.noise == "predicted" else 1)
        outputs = data.num_classes if data.classes else targets
        return {
            "name": self.network,
            "input_shape": tuple(data.shape),
            "num_classes": outputs,
            **options,
        }

    def model_factory(self, data: DataSet) -> Callable[[], nn.Module]:
        """Return a function that builds the network for `data`, after testing that it can."""
        arguments = self.build(data)

        def make() -> nn.Module:
            return build_model(**arguments)

        with forked_random_numbers(), torch.device("meta"):
            make()
        return make

    def fit_arguments(self, data: DataSet, steps_per_epoch: int) -> dict[str, Any]:
        """Return what `fit` takes of the settings; the network and the data themselves are the caller's.

        Args:
            data: The data.
            steps_per_epoch: Number of updates in an epoch.
        """
        return {
            "method": self.method, "epochs": self.epochs, "likelihood": self.likelihood(data),
            "init": self.init or None, "reset": self.reset or None, "schedule": self.schedule,
            "clip_norm": self.clip_norm or None, "amp": self.amp or None,
            "accumulate": self.accumulate, "memory_format": self.memory_format or None,
            "compile": self.compile or False, "seed": self.seed,
            **translated(self.options, steps_per_epoch),
        }  # fmt: skip

    def load_data(self, data_dir: Path | None, encoding: TableEncoding | None = None) -> DataSet:
        """Load the data and split it according to the settings.

        Args:
            data_dir: Folder of the data, if not the usual one.
            encoding: Encoding of a table that a run has kept.
        """
        return self.split(self.load_whole(data_dir, encoding))

    def load_whole(self, data_dir: Path | None, encoding: TableEncoding | None = None) -> DataSet:
        """Load the data before validation and training examples are chosen."""
        return load_data(
            self.data, data_dir=data_dir, seed=self.seed, encoding=encoding, **self.table
        )

    def split(self, whole: DataSet) -> DataSet:
        """Hold out the validation split and draw the training examples; `whole` is not changed."""
        if whole.table is not None and self.table.get("split") == "seed":
            whole = whole.table.split(self.seed).dataset()
        data = hold_out(self._shifting(whole), self.validation, self.seed)
        if self.examples == 0:
            return data
        if self.examples > data.train_size:
            raise ValueError(
                f"examples is {self.examples}: {self.data} has {data.train_size} to train on; give fewer, or "
                "0 for all"
            )
        order = torch.randperm(data.train_size, generator=torch.Generator().manual_seed(self.seed))
        return data.divided(order[: self.examples])

    def _shifting(self, whole: DataSet) -> DataSet:
        """Return the data with an augmentation that moves images by `augment_shift` pixels at most."""
        if self.augment_shift == 0:
            return whole
        if not isinstance(whole.augment, PadCropFlip):
            raise ValueError(
                f"augment_shift is {self.augment_shift}, but no augmentation moves the examples of "
                f"{whole.name}: leave it out"
            )
        shifting = dataclasses.replace(whole.augment, pad=self.augment_shift)
        return dataclasses.replace(whole, augment=shifting)


_LATER: Mapping[str, Any] = {
    "init": "",
    "reset": (),
    "memory_format": "",
    "compile": "",
    "augment_shift": 0,
}

SETTINGS: Mapping[str, Any] = {**Experiment().settings(), **_LATER}
"""All settings of a recipe or a config.toml, with their defaults."""

_SCHEDULE_KEYS = Schedule().settings().keys()


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise a `ValueError` that names the first unknown key of `table`."""
    names = list(known)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(names)}"
            raise ValueError(f"{where} has an unknown key {key!r}: {hint}")
