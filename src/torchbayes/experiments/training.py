"""Train an experiment with a suitable number of threads, and measure its peak memory."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from torchbayes.core import distributed
from torchbayes.core.device import forked_random_numbers, process_device
from torchbayes.core.errors import FileError
from torchbayes.core.storage import write_json
from torchbayes.data import DataSet, make_loader
from torchbayes.experiments.cost import peak_memory, read_peak
from torchbayes.experiments.made_with import check_run, run_config
from torchbayes.experiments.provenance import commit
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import preprocessing_of
from torchbayes.optim.sgld import SGLD
from torchbayes.train.fit import fit
from torchbayes.train.progress import Progress
from torchbayes.train.registry import find_method
from torchbayes.train.run import Run
from torchbayes.train.run_folder import RunFolder
from torchbayes.train.tracking import Logger

__all__ = ["threads_for", "train_experiment"]

_WORTH_THREADS = 5_000_000  # weights × examples per update: LeNet-5 at batch 128 has 8 million
_warm: set[str] = set()
_LOG = logging.getLogger("torchbayes")


def train_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    data: DataSet,
    resume: bool = False,
    checkpoint_seconds: float = 30.0,
    device: str | torch.device | None = None,
    progress: bool | Progress = True,
    logger: Logger | None = None,
) -> Run:
    """Train with the given settings and write the result to a run folder.

    Args:
        experiment: Settings.
        folder: Run folder.
        data: Result of `experiment.load_data`.
        resume: Continue the run in `folder`, if there is one.
        checkpoint_seconds: Seconds between checkpoints.
        device: Device to train on; the machine's accelerator, if it has one, or else the CPU if None.
        progress: Whether to show a progress bar, or a custom display.
        logger: Receives per-epoch metrics and the posterior's path.
    """
    there = RunFolder(folder)
    if resume and there.config_file.exists():
        check_run(there, experiment, data)
    make = experiment.model_factory(data)
    with distributed.process_group(device):
        place = process_device(device)
        alone = find_method(experiment.method).one_per_rank
        rank, world = (0, 1) if alone else (distributed.rank(), distributed.world_size())
        loader = make_loader(
            data, data.train, experiment.batch_size, shuffle=True, augment=experiment.augment,
            seed=experiment.seed, rank=rank, world_size=world,
        )  # fmt: skip
        held_out = None if data.validation is None else make_loader(data, data.validation, 512)
        with threads_for(make, experiment.batch_size):
            _warm_up(experiment, data, make, place)
            with peak_memory(place) as peak:
                run = fit(
                    make, loader, validation=held_out, device=place, folder=folder, resume=resume,
                    checkpoint_seconds=checkpoint_seconds,
                    config={
                        **run_config(experiment, data), "build": experiment.build(data),
                        "commit": commit() or None,
                    },
                    progress=progress, logger=logger, **experiment.fit_arguments(data, len(loader)),
                )  # fmt: skip
        if distributed.rank() == 0 and peak.bytes is not None:
            _note_peak(folder, peak.bytes)
        run.preprocessing = preprocessing_of(data)
        if distributed.rank() == 0:
            run.preprocessing.save(there.inputs_file, there.table_file)
        return run


@contextlib.contextmanager
def threads_for(make: Callable[[], nn.Module], batch_size: int) -> Iterator[None]:
    """Use one thread for a network so small that threads would mostly wait for each other.

    On a busy machine they wait long: all threads of a layer must finish before the next one starts.
    """
    with forked_random_numbers(), torch.device("meta"):
        weights = sum(p.numel() for p in make().parameters())
    before = torch.get_num_threads()
    if weights * batch_size < _WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warm_up(
    experiment: Experiment, data: DataSet, make: Callable[[], nn.Module], device: torch.device
) -> None:
    """Train a throw-away network for one update, and take one sampler step.

    What a process imports and allocates for its first update, its first checkpoint and the compiled loops
    (10 to 100 MB) should not count as the cost of the method that happens to come first. Once for every
    network and batch size is enough.
    """
    kind = f"{experiment.network} {experiment.model_options} {data.shape} {experiment.batch_size}"
    if kind in _warm:
        return
    _warm.add(kind)
    size = math.ceil(experiment.batch_size / experiment.accumulate)
    few = data.train.subset(torch.arange(min(size, data.train_size)))
    loader = make_loader(data, few, size, shuffle=True, augment=experiment.augment)
    with forked_random_numbers(), tempfile.TemporaryDirectory() as folder:
        model = make().to(device)
        try:
            fit(
                model, loader, epochs=1, likelihood=experiment.likelihood(data),
                amp=experiment.amp or None, folder=folder, progress=False, in_place=True,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped before the first update") from None
        # A layer of its own: of a network with batch norm the sampler would say that it should not sample it.
        layer = nn.Linear(2, 1).to(device)
        layer(torch.ones(1, 2, device=device)).sum().backward()
        SGLD(layer, train_size=size).step()


def _note_peak(folder: Path, peak: int) -> None:
    """Record the largest peak over all sessions of a run."""
    file = folder / "cost.json"
    before = 0
    if file.exists():
        try:
            before = read_peak(file, "only this session's peak is known")
        except FileError as error:
            _LOG.warning("%s", error)
    write_json(file, {"peak_memory": max(peak, before)})
