"""The settings of one training run, as recipes and run folders hold them, and what they name.

A file has a flat table of settings, `SETTINGS`; here the learning rate's course is one `Schedule`.
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

from torchbayes.data import DataSet, load_data
from torchbayes.data.dataset import hold_out
from torchbayes.experiments.options import check_spelling
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood
from torchbayes.models import build_model
from torchbayes.train.registry import find_method
from torchbayes.train.schedule import Schedule

__all__ = ["SETTINGS", "Experiment", "check_keys"]

_NOISES = ("learned", "fixed", "predicted")
# The usual network for a data set, with its options; for all others, LeNet-5.
_USUAL_MODEL: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("mlp", {"hidden": [200, 200]}),
    "moons": ("mlp", {"hidden": [50, 50]}),
    "bbb-curve": ("mlp", {"hidden": [100, 100]}),
}


@dataclass(frozen=True)
class Experiment:
    """Every setting of a run; the defaults suit `digits`.

    Args:
        data: A data set's name or a folder of images.
        model: A network's name; empty for the usual one for the data.
        method: A method's name.
        epochs: How often to go through the training set.
        batch_size: The examples per update.
        samples: The draws to predict with.
        seed: Random seed.
        validation: The share of the training set to hold out and score after every epoch.
        examples: Train on this many examples, drawn at random; 0 for all of them.
        augment: Use the data set's usual augmentation.
        schedule: The learning rate's course. In a file its name is `schedule`, and its other arguments
            are settings of their own.
        clip_norm: The largest norm that a gradient may have; 0 for no limit.
        amp: bfloat16 or float16 for mixed precision; empty for none.
        accumulate: The pieces in which each update's gradient is computed.
        noise: In a regression, the targets' Gaussian noise: learned (one level), fixed, or predicted by
            the network for every input.
        noise_std: Its standard deviation if it is fixed, where learning starts if it is learned.
        model_options: The network's own options.
        options: The method's own options.
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
    schedule: Schedule = field(default_factory=Schedule)
    clip_norm: float = 0.0
    amp: str = ""
    accumulate: int = 1
    noise: str = "learned"
    noise_std: float = 1.0
    model_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], where: str) -> Experiment:
        """Build one from a flat table of settings, and check it.

        Args:
            settings: Some of `SETTINGS`.
            where: What to call the table in a message.

        Example:
            >>> Experiment.from_settings({"schedule": "cyclic", "cycles": 4}, "here").schedule.cycles
            4
        """
        check_keys(settings, SETTINGS, where)
        own: dict[str, Any] = {}
        course: dict[str, Any] = {}
        for key, value in settings.items():
            default = SETTINGS[key]
            if isinstance(default, float) and type(value) is int:
                value = float(value)
            if isinstance(default, tuple) and isinstance(value, list):
                value = tuple(value)
            if type(value) is not type(default):
                raise ValueError(
                    f"{where}: {key} is {value!r}, expected a value such as {default!r}"
                )
            if key == "schedule":
                course["name"] = value
            else:
                (course if key in _COURSE else own)[key] = value
        return cls(**own, schedule=Schedule(**course)).check()

    def settings(self) -> dict[str, Any]:
        """The flat table that `from_settings` takes."""
        flat: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            flat |= self.schedule.settings() if name == "schedule" else {name: value}
        return flat

    def check(self) -> Experiment:
        """Raise a `ValueError` for names and numbers that cannot be right; return the same experiment."""
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
        if self.examples < 0:
            raise ValueError(
                f"examples is {self.examples}: expected how many to train on, or 0 for all"
            )
        if self.noise not in _NOISES:
            raise ValueError(f"noise is {self.noise!r}: expected {' or '.join(_NOISES)}")
        self._noise()
        return self

    def _noise(self) -> GaussianNoise:
        return GaussianNoise(
            self.noise_std, learned=self.noise == "learned", predicted=self.noise == "predicted"
        )

    def likelihood(self, data: DataSet) -> Likelihood:
        """What the network's outputs mean: classes if `data` has them, else numbers with noise."""
        return Categorical() if data.classes else self._noise()

    @property
    def network(self) -> str:
        """The network's name, the data's usual one if none is set."""
        return self.model if self.model else _USUAL_MODEL.get(self.data, ("lenet5",))[0]

    def model_factory(self, data: DataSet) -> Callable[[], nn.Module]:
        """A function that makes the network for `data`, after one trial that shows it can."""
        usual = {} if self.model else _USUAL_MODEL.get(self.data, ("", {}))[1]
        options = {**usual, **self.model_options}
        targets = data.num_targets * (2 if self.noise == "predicted" else 1)
        outputs = data.num_classes if data.classes else targets

        def make() -> nn.Module:
            return build_model(self.network, input_shape=data.shape, num_classes=outputs, **options)

        with torch.random.fork_rng(), torch.device("meta"):
            make()
        return make

    def load_data(self, data_dir: Path | None) -> DataSet:
        """Load the data, split as the settings ask for."""
        return self.split(load_data(self.data, data_dir=data_dir))

    def split(self, whole: DataSet) -> DataSet:
        """Hold out the validation split and keep as many training examples as asked for, drawn by the seed.

        Args:
            whole: The data set as it was loaded; it stays as it is, and is the result if nothing is drawn.
        """
        data = hold_out(whole, self.validation, self.seed)
        if self.examples == 0:
            return data
        if self.examples > data.train_size:
            raise ValueError(
                f"examples is {self.examples}: {self.data} has {data.train_size} to train on; give fewer, or "
                "0 for all"
            )
        order = torch.randperm(data.train_size, generator=torch.Generator().manual_seed(self.seed))
        return dataclasses.replace(data, train=data.train.subset(order[: self.examples]))


SETTINGS: Mapping[str, Any] = Experiment().settings()
"""Every setting that a recipe or a config.toml may have, with its default."""

_COURSE = Schedule().settings().keys()


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise a `ValueError` that names the first key of `table` that is not a known one."""
    names = list(known)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(names)}"
            raise ValueError(f"{where} has an unknown key {key!r}: {hint}")
