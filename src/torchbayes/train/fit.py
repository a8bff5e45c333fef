"""`fit`: a network and data in, a trained posterior out. The loop itself is in `torchbayes.train.loop`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchbayes.core import distributed
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Posterior
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import Predictive
from torchbayes.train.data import as_loader, check_data, device_of, likelihood_for
from torchbayes.train.loop import Training
from torchbayes.train.method import Plan
from torchbayes.train.progress import NoProgress, Progress, RichProgress
from torchbayes.train.registry import check_options, find_method
from torchbayes.train.schedule import Schedule
from torchbayes.train.tracking import Logger

__all__ = ["Run", "fit"]

_AMP = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Run:
    """A finished training run.

    Attributes:
        model: The network, with the weights of the end of training; the result is `posterior`.
        posterior: What was learned about the weights.
        history: One dictionary of metrics per epoch.
        likelihood: Meaning of the network's outputs.
        method: Name of the method.
        seconds: Training time, over all resumed parts.
    """

    model: nn.Module
    posterior: Posterior
    history: list[dict[str, Any]]
    likelihood: Likelihood
    method: str
    seconds: float

    def predict(self, inputs: Any, samples: int = 32, **kwargs: Any) -> Predictive:
        """Predict with the weights averaged out; see `torchbayes.predictive`."""
        return predictive(
            self.model, self.posterior, inputs, samples, likelihood=self.likelihood, **kwargs
        )


def fit(
    model: nn.Module | Callable[[], nn.Module],
    train_set: Any,
    method: str = "map",
    *,
    epochs: int = 10,
    batch_size: int = 128,
    likelihood: Likelihood | Any | None = None,
    validation: Any | None = None,
    transform: Callable[[Any, torch.Generator], Any] | None = None,
    schedule: str | Schedule = "constant",
    clip_norm: float | None = None,
    amp: str | None = None,
    accumulate: int = 1,
    seed: int = 0,
    device: str | torch.device | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 30.0,
    config: dict[str, Any] | None = None,
    progress: bool | Progress = True,
    logger: Logger | None = None,
    **options: Any,
) -> Run:
    """Train a network into a posterior.

    With a `folder`, the run survives a kill at any moment: the same call with `resume=True` continues from
    the last checkpoint and ends with bit-equal weights. Ctrl-C saves a checkpoint before it stops.

    Args:
        model: The network, or a function that makes one. An ensemble needs several random starts: a
            function gives them, a network's layers are asked to `reset_parameters`.
        train_set: A pair of tensors (inputs, targets), a map-style torch data set, or one of
            torchbayes' loaders.
        method: A name of `torchbayes.METHODS`, such as `"map"` or `"ensemble"`.
        epochs: Passes through the training set.
        batch_size: Examples per update (not used with a loader).
        likelihood: Meaning of the outputs; by default classes for integer targets, Gaussian noise of learned
            size for real ones.
        validation: Inputs and targets, or a loader of them, to score after every epoch.
        transform: Applied to every batch of inputs, such as normalisation and augmentation.
        schedule: Learning-rate schedule.
        clip_norm: Largest norm of a gradient; no limit if None.
        amp: `"bfloat16"` or `"float16"` to compute the forward pass in that type.
        accumulate: Gradient-accumulation steps per update, to save memory.
        seed: Random seed, for the order of the data, augmentation and all draws.
        device: Device to train on; the model's own if None.
        folder: Run folder, for checkpoints, metrics and the posterior.
        resume: Continue the run in `folder`, if there is one.
        checkpoint_seconds: Time between checkpoints.
        config: What to write to the folder's config.toml besides these settings.
        progress: Show a progress bar; or the object that shows it.
        logger: Receives per-epoch metrics and the posterior's path, such as `torchbayes.TensorBoard`.
        **options: Options of the method, such as `lr`; `torchbayes methods NAME` lists them.

    Raises:
        ValueError: If an argument or the data is not as described.
        TrainingError: If the loss is not finite; it names the step and the layer.

    Example:
        >>> import torch, torchbayes as tb
        >>> x = torch.randn(200, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> run = tb.fit(net, (x, y), method="map", epochs=20, lr=0.01, progress=False)
        >>> bool((run.predict(x).prediction == y).float().mean() > 0.9)
        True
    """
    method_class = find_method(method)
    check_options(method_class, options)
    schedule = Schedule(schedule) if isinstance(schedule, str) else schedule
    _check_numbers(epochs, batch_size, accumulate, clip_norm, amp)
    with distributed.process_group(), _seeded(seed):
        made = model() if not isinstance(model, nn.Module) else model
        if device is not None:
            made = made.to(device)
        rank, world = distributed.rank(), distributed.world_size()
        shard = (0, 1) if method_class.one_per_rank else (rank, world)
        loader = as_loader(train_set, batch_size, seed, transform, shard)
        noise = likelihood_for(loader, likelihood).to(device_of(made))
        check_data(made, loader, noise)
        if not method_class.one_per_rank:
            distributed.broadcast([*made.parameters(), *made.buffers()])
        torch.manual_seed(
            seed + 1_000_003 * (rank + 1)
        )  # the model is made: from here on ranks differ
        plan = Plan(
            train_size=loader.num_examples,
            epochs=epochs,
            steps_per_epoch=len(loader),
            generator=torch.Generator(device_of(made)).manual_seed(seed + 7_919 * (rank + 1)),
            new_model=_factory(model, made),
            schedule=schedule,
            rank=rank,
            world_size=world,
        )
        settings = {
            "method": method,
            "epochs": epochs,
            "batch_size": loader.batch_size,
            "seed": seed,
            "train_size": loader.num_examples,
            "network": type(made).__name__,
            **schedule.settings(),
            "clip_norm": clip_norm,
            "amp": amp,
            "accumulate": accumulate,
            "options": {name: _plain(value) for name, value in options.items()},
            **({} if config is None else config),
        }
        training = Training(
            method=method_class(made, noise, plan, **options),
            loader=loader,
            validation=validation,
            transform=transform,
            clip_norm=clip_norm,
            amp=None if amp is None else _AMP[amp],
            accumulate=accumulate,
            checkpoint_seconds=checkpoint_seconds,
            logger=logger,
        )
        with training.opened(folder, settings, resume):
            training.run(_progress(progress, rank))
            posterior = training.method.posterior()
            if training.folder is not None and rank == 0:
                posterior.save(training.folder.posterior_file)
                if logger is not None:
                    logger.artifact(training.folder.posterior_file)
            distributed.barrier()
    return Run(made, posterior, training.history, noise, method, training.seconds)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them afterwards."""
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _progress(progress: bool | Progress, rank: int) -> Progress:
    if isinstance(progress, Progress):
        return progress
    return RichProgress() if progress and rank == 0 else NoProgress()


def _plain(option: Any) -> Any:
    """Return an option as config.toml can hold it: a function by its name, a prior by its description."""
    if option is None or isinstance(option, (bool, int, float, str, list, tuple)):
        return option
    return getattr(option, "__name__", repr(option))


def _check_numbers(
    epochs: int, batch_size: int, accumulate: int, clip_norm: float | None, amp: str | None
) -> None:
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("accumulate", accumulate)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected a whole number of at least 1")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm:g}: expected a norm above 0")
    if amp is not None and amp not in _AMP:
        raise ValueError(f"amp is {amp!r}: expected bfloat16 or float16")


def _factory(
    model: nn.Module | Callable[[], nn.Module], made: nn.Module
) -> Callable[[], nn.Module]:
    if not isinstance(model, nn.Module):
        return model

    def fresh() -> nn.Module:
        twin = copy.deepcopy(made)
        for name, module in twin.named_modules():
            reset = getattr(module, "reset_parameters", None)
            own = list(module.parameters(recurse=False))
            if callable(reset):
                reset()
            elif own:
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) has weights but no reset_parameters() to "
                    "give them a new random start: pass fit a function that makes the network"
                )
        return twin

    return fresh
