"""One training run by name: data, network, method and every setting, as recipes and run folders hold it."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes import metrics
from torchbayes.core import distributed
from torchbayes.core.storage import write_text
from torchbayes.data import DataSet, OutOfDistribution, load_data, make_loader, noise_for, ood_for
from torchbayes.data.transform import Normalise
from torchbayes.experiments.cost import peak_memory, stored_numbers
from torchbayes.experiments.options import check_spelling, translated
from torchbayes.experiments.predictions_file import Predictions, RegressionPredictions
from torchbayes.experiments.robustness import corruption_scores
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood
from torchbayes.models import build_model
from torchbayes.posterior import Point, Posterior, PosteriorFileError, Samples, load
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive, Predictive, RegressionPredictive
from torchbayes.predict.running import Growing, GrowingPredictive
from torchbayes.train.fit import Run, fit
from torchbayes.train.progress import Progress
from torchbayes.train.registry import find_method
from torchbayes.train.run_folder import RunError, RunFolder, read_toml
from torchbayes.train.schedule import Schedule
from torchbayes.train.tracking import Logger

__all__ = ["Experiment", "TrainedRun", "check_keys", "recipe_settings"]

_DAMAGED_DRAWS = 16  # for 31 times the images: enough to tell methods apart, at half the time of 32
_WORTH_THREADS = 5_000_000  # weights × examples per update: LeNet-5 at batch 128 has 8 million
_NOISES = ("learned", "fixed", "predicted")
_DEFAULT_MODEL = {"digits": "mlp", "moons": "mlp", "bbb-curve": "mlp"}
_DEFAULT_MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "digits": {"hidden": [200, 200]},
    "moons": {"hidden": [50, 50]},
    "bbb-curve": {"hidden": [100, 100]},
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
        seed: Of everything random.
        validation: The share of the training set to hold out and score after every epoch.
        examples: Train on this many examples, drawn at random; 0 for all of them.
        augment: Use the data set's usual augmentation.
        schedule: The learning rate's course: constant, cosine, linear, step or cyclic.
        milestones: The epochs at which a step schedule drops.
        gamma: The factor it drops by.
        warmup_epochs: The epochs of a linear rise at the start.
        cycles: The number of cycles of a cyclic schedule.
        low: What a cycle falls to, as a fraction of the rate.
        power: The exponent of a polynomial schedule.
        offset: The epochs in which it begins to fall.
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
    schedule: str = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup_epochs: float = 0.0
    cycles: int = 1
    low: float = 0.0
    power: float = 0.55
    offset: float = 1.0
    clip_norm: float = 0.0
    amp: str = ""
    accumulate: int = 1
    noise: str = "learned"
    noise_std: float = 1.0
    model_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], where: str) -> Experiment:
        """Build one from a table of settings; a key that is not one is named with the nearest real one."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        check_keys(settings, known, where)
        values: dict[str, Any] = {}
        for key, value in settings.items():
            default = getattr(_DEFAULTS, key)
            if isinstance(default, float) and type(value) is int:
                value = float(value)
            if isinstance(default, tuple) and isinstance(value, list):
                value = tuple(value)
            if type(value) is not type(default):
                raise ValueError(
                    f"{where}: {key} is {value!r}, expected a {type(default).__name__} such as {default!r}"
                )
            values[key] = value
        return cls(**values).check()

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
        self._schedule()
        return self

    def _noise(self) -> GaussianNoise:
        return GaussianNoise(
            self.noise_std, learned=self.noise == "learned", predicted=self.noise == "predicted"
        )

    def likelihood(self, data: DataSet) -> Likelihood:
        """What the network's outputs mean: classes if `data` has them, else numbers with noise."""
        return Categorical() if data.classes else self._noise()

    def _schedule(self) -> Schedule:
        return Schedule(
            self.schedule,
            self.milestones,
            self.gamma,
            self.warmup_epochs,
            self.cycles,
            self.low,
            self.power,
            self.offset,
        )

    @property
    def network(self) -> str:
        """The network's name, the data's usual one if none is set."""
        return self.model if self.model else _DEFAULT_MODEL.get(self.data, "lenet5")

    def model_factory(self, data: DataSet) -> Callable[[], nn.Module]:
        """A function that makes the network for `data`, after one trial that shows it can."""
        usual = {} if self.model else _DEFAULT_MODEL_OPTIONS.get(self.data, {})
        options = {**usual, **self.model_options}
        targets = data.num_targets * (2 if self.noise == "predicted" else 1)
        outputs = data.num_classes if data.classes else targets

        def make() -> nn.Module:
            return build_model(self.network, input_shape=data.shape, num_classes=outputs, **options)

        with torch.random.fork_rng(), torch.device("meta"):
            make()
        return make

    def load_data(self, data_dir: Path | None, download: bool = True) -> DataSet:
        """The data, with the validation split and as many training examples as the settings ask for."""
        data = load_data(
            self.data,
            data_dir=data_dir,
            download=download,
            validation=self.validation,
            seed=self.seed,
        )
        if self.examples == 0:
            return data
        if self.examples > data.train_size:
            raise ValueError(
                f"examples is {self.examples}: {self.data} has {data.train_size} to train on; give fewer, or "
                "0 for all"
            )
        order = torch.randperm(data.train_size, generator=torch.Generator().manual_seed(self.seed))
        return dataclasses.replace(data, train=data.train.subset(order[: self.examples]))

    def train(
        self,
        folder: Path,
        *,
        data: DataSet,
        resume: bool = False,
        checkpoint_seconds: float = 30.0,
        progress: bool | Progress = True,
        logger: Logger | None = None,
    ) -> Run:
        """Train and leave the result in `folder`."""
        make = self.model_factory(data)
        with distributed.process_group():
            alone = find_method(self.method).one_per_rank
            loader = make_loader(
                data,
                data.train,
                self.batch_size,
                shuffle=True,
                augment=self.augment,
                seed=self.seed,
                rank=0 if alone else distributed.rank(),
                world_size=1 if alone else distributed.world_size(),
            )
            held_out = None if data.validation is None else make_loader(data, data.validation, 512)
            mine = dataclasses.asdict(self)
            with _threads_for(make, self.batch_size), peak_memory() as peak:
                run = fit(
                    make,
                    loader,
                    self.method,
                    epochs=self.epochs,
                    likelihood=self.likelihood(data),
                    validation=held_out,
                    schedule=self._schedule(),
                    clip_norm=self.clip_norm if self.clip_norm else None,
                    amp=self.amp if self.amp else None,
                    accumulate=self.accumulate,
                    seed=self.seed,
                    device="cuda" if torch.cuda.is_available() else None,
                    folder=folder,
                    resume=resume,
                    checkpoint_seconds=checkpoint_seconds,
                    config=mine | {"clip_norm": self.clip_norm, "amp": self.amp},
                    progress=progress,
                    logger=logger,
                    **translated(self.options, len(loader)),
                )
            if distributed.rank() == 0 and peak.bytes is not None:
                _note_peak(folder, peak.bytes)
            return run


def _note_peak(folder: Path, peak: int) -> None:
    """Keep the largest peak of all the sessions that a run took."""
    file = folder / "cost.json"
    before = json.loads(file.read_text(encoding="utf-8"))["peak_memory"] if file.exists() else 0
    write_text(file, json.dumps({"peak_memory": max(peak, before)}) + "\n")


_DEFAULTS = Experiment()


class TrainedRun:
    """A run folder with a finished run in it.

    Args:
        folder: The run folder.
        data_dir: Where its data is, if not in the usual place.
    """

    def __init__(self, folder: Path, data_dir: Path | None = None) -> None:
        self.files = RunFolder(folder)
        self.config = self.files.read_config()
        known = {f.name for f in dataclasses.fields(Experiment)}
        self.experiment = Experiment.from_settings(
            {key: value for key, value in self.config.items() if key in known},
            str(self.files.config_file),
        )
        self.data_dir = data_dir
        self.data = self.experiment.load_data(data_dir)
        self.model = self.experiment.model_factory(self.data)()

    def posterior(self) -> Posterior:
        """The run's result."""
        if not self.files.posterior_file.exists():
            raise RunError(
                f"{self.files.path} has no posterior yet: finish it with the command that started it and "
                "--resume"
            )
        try:
            return load(self.files.posterior_file, self.model)
        except PosteriorFileError as error:
            raise RunError(str(error)) from error

    def last_sample(self) -> Point:
        """The last of a sampler's samples as a posterior of its own: what one network of them is worth."""
        posterior = self.posterior()
        if not isinstance(posterior, Samples):
            raise RunError(
                f"{self.files.path} has a {type(posterior).__name__} posterior, which has no last sample: "
                "leave out --last"
            )
        return Point(posterior[-1], model_name=posterior.model_name)

    def likelihood(self) -> Likelihood:
        """What the network's outputs mean, with the noise that was learned in training."""
        likelihood = self.experiment.likelihood(self.data)
        if isinstance(likelihood, GaussianNoise) and likelihood.learned:
            state = self.files.read_checkpoint()
            if state is None:
                raise RunError(
                    f"{self.files.checkpoint_file} is missing, which has the noise level that was learned: "
                    "train the run again"
                )
            likelihood.load_state_dict(state["likelihood"])
        return likelihood

    def predict(
        self,
        inputs: Any,
        samples: int | None = None,
        seed: int = 0,
        *,
        last: bool = False,
        posterior: Posterior | None = None,
        likelihood: Likelihood | None = None,
    ) -> Predictive:
        """Predict inputs that are normalised already.

        Args:
            inputs: What `torchbayes.predictive` takes.
            samples: The draws to predict with; the run's own setting if None.
            seed: Of the draws.
            last: Use the last of a sampler's samples alone.
            posterior: Use another posterior than the run's, such as a pruned one.
            likelihood: What the outputs mean, if not the run's own.
        """
        if posterior is None:
            posterior = self.last_sample() if last else self.posterior()
        return predictive(
            self.model,
            posterior,
            inputs,
            self.experiment.samples if samples is None else samples,
            self.likelihood() if likelihood is None else likelihood,
            torch.Generator().manual_seed(seed),
        )

    def evaluate(
        self,
        samples: int | None = None,
        ood: OutOfDistribution | None = None,
        *,
        last: bool = False,
        corruptions: bool = False,
    ) -> dict[str, float | None]:
        """Score the run on its test set and keep predictions and scores.json in its folder.

        The predictions of classes are in predictions.npz, those of a regression in regression.npz.

        Args:
            samples: The draws to predict with; the run's own setting if None.
            ood: The out-of-distribution inputs; the usual ones for the data if None.
            last: Score the last of a sampler's samples alone, and keep the files in the folder `last`.
            corruptions: Score damaged test images too, and keep the scores in corruptions.json.
        """
        data = self.data
        ood = ood_for(data, self.data_dir) if ood is None else ood
        loader = make_loader(data, data.test, 1000)
        targets = torch.cat([batch[1] for batch in loader.batches(0)])
        normalise = Normalise(data.mean, data.std)
        foreign = normalise(ood.inputs, torch.Generator())
        growing = Growing() if data.classes else None
        test = self.predict(loader, samples, last=last, likelihood=growing)
        other = self.predict(foreign, samples, last=last)
        folder = self.files.path / "last" if last else self.files.path
        folder.mkdir(exist_ok=True)
        predictions: Predictions | RegressionPredictions
        extra: dict[str, float] = {}
        if isinstance(test, ClassPredictive) and isinstance(other, ClassPredictive):
            predictions = Predictions.of(test, targets, other)
            predictions.save(folder / "predictions.npz")
            if isinstance(test, GrowingPredictive):
                _write_json(folder / "draws.json", _course(test, targets))
            noise = noise_for(data)
            if noise is not None:
                blank = self.predict(normalise(noise.inputs, torch.Generator()), samples, last=last)
                assert isinstance(blank, ClassPredictive)
                extra["auroc_noise"] = metrics.auroc(test.entropy, blank.entropy)
        else:
            assert isinstance(test, RegressionPredictive)
            assert isinstance(other, RegressionPredictive)
            predictions = RegressionPredictions.of(test, targets, other)
            predictions.save(folder / "regression.npz")
        scores = {key: _finite(value) for key, value in (predictions.scores() | extra).items()}
        rows = self.files.read_metrics()
        scores["seconds"] = float(rows[-1]["seconds"]) if rows else None
        scores["parameters"] = float(sum(p.numel() for p in self.model.parameters()))
        scores |= self._cost(last)
        if corruptions:
            draws = min(_DAMAGED_DRAWS, self.experiment.samples if samples is None else samples)
            damaged = corruption_scores(
                lambda batches: self.predict(batches, draws, last=last), data
            )
            damaged["draws"] = draws
            _write_json(folder / "corruptions.json", damaged)
        _write_json(folder / "scores.json", scores)
        return scores

    def _cost(self, last: bool) -> dict[str, float | None]:
        """Time, memory and storage; nothing of its own for one sample of a run."""
        if last:
            return {"stored": float(sum(t.numel() for t in self.last_sample().mean().values()))}
        rows, file = self.files.read_metrics(), self.files.path / "cost.json"
        cost: dict[str, float | None] = {
            "seconds_per_epoch": float(rows[-1]["seconds"]) / self.experiment.epochs
            if rows
            else None,
            "stored": float(stored_numbers(self.files.posterior_file)),
        }
        if file.exists():
            cost["peak_memory"] = float(json.loads(file.read_text("utf-8"))["peak_memory"])
        return cost


def _write_json(file: Path, content: Any) -> None:
    write_text(file, json.dumps(content, indent=2) + "\n")


def _course(test: GrowingPredictive, targets: Tensor) -> list[dict[str, float]]:
    """The scores of the average over the first 1, 2, 4, … draws."""
    return [
        {
            "draws": draws,
            "nll": metrics.nll(probs, targets),
            "accuracy": metrics.accuracy(probs, targets),
        }
        for draws, probs in test.stages.items()
    ]


@contextlib.contextmanager
def _threads_for(make: Callable[[], nn.Module], batch_size: int) -> Iterator[None]:
    """Use one thread for a network so small that threads would mostly wait for each other.

    On a machine that has other work they wait for long: a layer's threads can only end together.
    """
    with torch.random.fork_rng(), torch.device("meta"):
        weights = sum(p.numel() for p in make().parameters())
    before = torch.get_num_threads()
    if weights * batch_size < _WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _finite(value: float) -> float | None:
    """JSON has no NaN: what is undefined is null."""
    return value if math.isfinite(value) else None


def check_keys(table: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` that names the first key of `table` that is not a known one."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
            raise ValueError(f"{where} has an unknown key {key!r}: {hint}")


def _merged(table: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`table` with the values of `over`, tables inside it merged likewise."""
    result = dict(table)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def recipe_settings(path: Path, *, cpu: bool = False) -> dict[str, Any]:
    """The settings of a recipe: its top-level keys, with those of its [cpu] table on top if asked for.

    `title`, `paper` and the [reported] table are for readers, [methods] and [rows] for `compare`.
    """
    table = read_toml(path)
    settings = {f.name: f for f in dataclasses.fields(Experiment)}
    known = settings | dict.fromkeys(
        ("title", "paper", "note", "reported", "after", "continual", "methods", "rows", "cpu")
    )
    check_keys(table, known, str(path))
    overrides = table.pop("cpu", {})
    check_keys(overrides, settings | {"methods": None, "rows": None}, f"{path}, [cpu]")
    if cpu:
        table = _merged(table, overrides)
    return {key: value for key, value in table.items() if key in {*settings, "methods", "rows"}}
