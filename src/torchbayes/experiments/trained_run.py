"""A run folder with a finished run in it, ready to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchbayes.data import DataSet, ImageFolder, Split, make_loader
from torchbayes.experiments.settings import SETTINGS, Experiment
from torchbayes.likelihood import GaussianNoise, Likelihood
from torchbayes.posterior import Point, Posterior, PosteriorFileError, Samples, load
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import Predictive
from torchbayes.train.run_folder import RunError, RunFolder

__all__ = ["TrainedRun"]


class TrainedRun:
    """A finished run.

    Args:
        folder: The run folder.
        data_dir: Where its data is, if not in the usual place.
        experiment: Its settings, if they are at hand; otherwise those of its config.toml.
        data: Its data, as `experiment.load_data` gives it, if it is at hand; otherwise it is loaded.
    """

    def __init__(
        self,
        folder: Path,
        data_dir: Path | None = None,
        *,
        experiment: Experiment | None = None,
        data: DataSet | None = None,
    ) -> None:
        self.files, self.data_dir = RunFolder(folder), data_dir
        self.experiment = _settings_of(self.files) if experiment is None else experiment
        self.data = self.experiment.load_data(data_dir) if data is None else data
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
            seed: Random seed of the draws.
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

    def predict_split(
        self, split: Split | ImageFolder, samples: int | None = None, **options: Any
    ) -> tuple[Predictive, Tensor]:
        """Predict a split of the run's data, and give its targets beside the predictions.

        Args:
            split: Such as `run.data.test`.
            samples: The draws to predict with; the run's own setting if None.
            **options: As for `predict`.
        """
        loader = make_loader(self.data, split, 1000)
        targets = torch.cat([batch[1] for batch in loader.batches(0)])
        return self.predict(loader, samples, **options), targets


def _settings_of(files: RunFolder) -> Experiment:
    config = files.read_config()
    own = {key: value for key, value in config.items() if key in SETTINGS}
    return Experiment.from_settings(own, str(files.config_file))
