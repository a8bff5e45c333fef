"""A run folder with a finished run in it, ready to predict."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.batch import map_tensors, split_batch
from torchbayes.data import (
    DataSet,
    ImageFolder,
    Normalise,
    Preprocessing,
    Split,
    TableEncoding,
    make_loader,
)
from torchbayes.data.table import encoded_nothing
from torchbayes.experiments.settings import SETTINGS, Experiment
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Point, Posterior, PosteriorFileError, Samples, load
from torchbayes.predict.predictive import is_loader, predictive
from torchbayes.predict.results import ClassPredictive, Predictive
from torchbayes.train.run import Run, load_run
from torchbayes.train.run_folder import RunError, RunFolder
from torchbayes.train.throughput import FORMATS, arranged

__all__ = ["TrainedRun", "kept_run", "on_cpu", "preprocessing_of", "run_settings"]


class TrainedRun:
    """A finished run.

    Args:
        folder: Run folder.
        data_dir: Folder of the data, if not the usual one.
        experiment: Settings of the run, read from its config.toml by default.
        data: Result of `experiment.load_data`, loaded by default.
        device: Device to predict on; the CPU if None.
    """

    def __init__(
        self,
        folder: Path,
        data_dir: Path | None = None,
        *,
        experiment: Experiment | None = None,
        data: DataSet | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.files, self.data_dir = RunFolder(folder), data_dir
        self.experiment = run_settings(self.files) if experiment is None else experiment
        self.data = self._load_data() if data is None else data
        self.model = self.experiment.model_factory(self.data)()
        self.files.read_rest(self.model)
        self.device = torch.device("cpu") if device is None else device
        self.model.to(self.device)

    def _load_data(self) -> DataSet:
        kept = self.experiment.is_table and self.files.posterior_file.exists()
        encoding = TableEncoding.load(self.files.table_file) if kept else None
        return self.experiment.load_data(self.data_dir, encoding)

    def require_classes(self, reason: str) -> None:
        """Raise a `ValueError` that gives the reason if the run is a regression."""
        if not self.data.classes:
            raise ValueError(f"{self.files.path} is a regression on {self.data.name}: {reason}")

    def posterior(self) -> Posterior:
        """Load the posterior."""
        if not self.files.posterior_file.exists():
            raise RunError(
                f"{self.files.path} has no posterior yet: start the run again with resume=True to finish it"
            )
        try:
            return load(self.files.posterior_file, self.model)
        except PosteriorFileError as error:
            raise RunError(str(error)) from error

    def last_sample(self) -> Point:
        """Return a sampler's last sample alone, as a posterior of one network."""
        posterior = self.posterior()
        if not isinstance(posterior, Samples):
            raise RunError(
                f"{self.files.path} has a {type(posterior).__name__} posterior, which has no last sample: "
                "leave out --last"
            )
        return Point(posterior[-1], model_name=posterior.model_name, rest=posterior.rest)

    def likelihood(self) -> Likelihood:
        """Return the likelihood, with the noise level that was learned in training."""
        kept = self.files.likelihood_file.exists()
        own = None if kept else self.experiment.likelihood(self.data)
        return self.files.read_likelihood(own).to(self.device)

    def predict(
        self,
        inputs: Any,
        samples: int | None = None,
        *,
        last: bool = False,
        posterior: Posterior | None = None,
        likelihood: Likelihood | None = None,
    ) -> Predictive:
        """Predict inputs that are already normalised; what is returned is on the CPU.

        Args:
            inputs: Inputs for `torchbayes.predictive`.
            samples: Number of draws, by default the run's own setting.
            last: Use a sampler's last sample alone.
            posterior: Posterior to use instead of the run's, such as a pruned one.
            likelihood: Likelihood to use instead of the run's.
        """
        if posterior is None:
            posterior = self.last_sample() if last else self.posterior()
        result = predictive(
            self.model,
            posterior,
            self._arranged(inputs),
            self.experiment.samples if samples is None else samples,
            self.likelihood() if likelihood is None else likelihood,
            torch.Generator().manual_seed(0),
            recalibrate=False,
        )
        return on_cpu(result)

    def _arranged(self, inputs: Any) -> Any:
        """Return inputs in the memory format that the run was trained in."""
        config = self.files.read_config() if self.files.config_file.exists() else {}
        form = config.get("chosen_format") or self.experiment.memory_format
        if form not in FORMATS[1:]:
            return inputs
        if is_loader(inputs):
            return (arranged(split_batch(batch)[0], form) for batch in inputs)
        return arranged(inputs, form)

    def predict_split(
        self, split: Split | ImageFolder, samples: int | None = None, **options: Any
    ) -> tuple[Predictive, Tensor]:
        """Predict a split of the run's data, and return the predictions and the targets.

        Args:
            split: Split, such as `run.data.test`.
            samples: Number of draws, by default the run's own setting.
            **options: Further arguments of `predict`.
        """
        loader = make_loader(self.data, split, 1000)
        targets = torch.cat([batch[1] for batch in loader.batches(0)])
        return self.predict(loader, samples, **options), targets

    def classify_split(
        self, split: Split | ImageFolder, samples: int | None = None, **options: Any
    ) -> tuple[ClassPredictive, Tensor]:
        """Do the same as `predict_split` for a classifier."""
        predictive, targets = self.predict_split(split, samples, **options)
        assert isinstance(predictive, ClassPredictive)
        return predictive, targets


def preprocessing_of(data: DataSet) -> Preprocessing:
    """Return what happens to the examples of a data set before the network sees them."""
    return Preprocessing(
        Normalise(data.mean, data.std), shape=data.shape, classes=data.classes, table=data.encoding
    )


def on_cpu(result: Predictive) -> Predictive:
    """Return predictions whose tensors are on the CPU, as scores, targets and files are."""
    moved = copy.copy(result)
    vars(moved).update(map_tensors(dict(vars(result)), Tensor.cpu))
    return moved


def kept_run(folder: Path, data_dir: Path | None = None, device: torch.device | None = None) -> Run:
    """Load a finished run of the command line, for predictions.

    The data are needed for a run of an older version only, which did not keep the names of its classes.

    Args:
        folder: Run folder.
        data_dir: Folder of the data, if not the usual one.
        device: Device to predict on; the CPU if None.
    """
    run = _loaded(folder, data_dir)
    if device is not None:
        run.model.to(device)
        run.likelihood.to(device)
    return run


def _loaded(folder: Path, data_dir: Path | None) -> Run:
    files = RunFolder(folder)
    settings = run_settings(files)
    if "build" in files.read_config() and files.likelihood_file.exists():
        run = load_run(folder)
        if run.preprocessing.shape:  # not if a kill came just before the names were written
            return run
    data = None
    if settings.is_table and files.table_file.exists():
        data = encoded_nothing(settings.data, TableEncoding.load(files.table_file))
    trained = TrainedRun(folder, data_dir, experiment=settings, data=data)
    given = None if files.likelihood_file.exists() else settings.likelihood(trained.data)
    run = load_run(folder, lambda: trained.model, likelihood=given)
    run.preprocessing = preprocessing_of(trained.data)
    return run


def run_settings(files: RunFolder) -> Experiment:
    """Return the settings of a run, from its config.toml."""
    config = files.read_config()
    if "data" not in config:
        raise RunError(
            f"{files.path} was trained in Python on data that its config.toml does not name: use "
            "torchbayes.load_run(folder, model) there"
        )
    own = {key: value for key, value in config.items() if key in SETTINGS}
    return Experiment.from_settings(own, str(files.config_file))
