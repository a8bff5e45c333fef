"""The loader for data that do not fit in memory: worker processes of torch's DataLoader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from torchbayes.core.batch import batch_weights, slice_batch, split_batch
from torchbayes.core.device import generator_state
from torchbayes.data.order import EXAMPLE, EpochLoader, mixed_seed
from torchbayes.data.source import DataError

__all__ = ["StreamLoader", "live_workers", "lost_worker", "next_batch", "restored_generators"]

_BROKEN = (ConnectionError, EOFError, FileNotFoundError)


class StreamLoader(EpochLoader):
    """Batches of a map-style data set, read and transformed by worker processes.

    Interface, order, shares and augmentation are those of `BatchLoader`: with the same data and seed
    the two give equal batches. Batches that a resumed run skips are not read.

    A data set may draw random numbers (for a random crop, say): while example i is read in epoch e,
    the global generators of torch, NumPy and Python are seeded with (seed, e, i) and restored
    afterwards, so the draws do not depend on the workers or on where a run was resumed.

    Args:
        dataset: Map-style data set of `inputs`, `(inputs, target)` or `(inputs, target, weight)`.
        batch_size: Examples per (global) batch.
        shuffle: Whether to draw a new random order for each epoch.
        seed: Non-negative seed of order and augmentation.
        transform: Called in the worker with a batch of inputs and a generator.
        drop_last: Whether to drop an incomplete last batch.
        rank: Rank of this process.
        world_size: Number of processes that share each batch: rank r gets its r-th contiguous part.
        workers: Number of worker processes; 0 reads in this process.

    Example:
        >>> data = [(torch.tensor([float(i)]), i) for i in range(5)]
        >>> loader = StreamLoader(data, 2, shuffle=False, seed=0, workers=0)
        >>> [targets.tolist() for _, targets in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, shuffle: bool, seed: int,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        drop_last: bool = False, rank: int = 0, world_size: int = 1, workers: int = 2,
    ) -> None:  # fmt: skip
        count = len(dataset)
        super().__init__(count, batch_size, shuffle, seed, transform, drop_last, rank, world_size)
        if workers < 0:
            raise ValueError(f"workers is {workers}: expected 0 or more")
        self.dataset = dataset
        self.workers = workers

    def _read(self, epoch: int, plan: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[Any, ...]]:
        jobs = (_Job(epoch, i.tolist(), self._augment_seed(epoch, batch)) for batch, i in plan)
        # batch_size=None: an "example" of this DataLoader is a whole batch, which its worker
        # transforms at once. The generator keeps it from drawing from torch's global one.
        loader = DataLoader(
            _Batches(self.dataset, self.seed, self.transform),
            batch_size=None,
            sampler=jobs,
            num_workers=self.workers,
            generator=torch.Generator(),
        )
        batches = iter(loader)
        while (result := next_batch(batches, None)) is not None:
            if isinstance(result, DataError):
                raise result
            yield result


class _Job(NamedTuple):
    epoch: int
    indices: list[int]
    seed: int


@dataclass(frozen=True)
class _Batches(Dataset[Any]):
    """A data set whose index is a job and whose example is a batch.

    A `DataError` is returned, not raised: DataLoader would wrap it in a traceback.
    """

    dataset: Any
    seed: int
    transform: Callable[[Any, torch.Generator], Any] | None

    def __getitem__(self, job: _Job) -> Any:
        examples = []
        with restored_generators():
            # An empty share keeps the shapes and types of the data: read any example, keep none.
            for index in job.indices or [0]:
                seed = mixed_seed(EXAMPLE, self.seed, job.epoch, index)
                torch.default_generator.manual_seed(seed)
                np.random.seed(seed)
                random.seed(seed)
                try:
                    examples.append(self.dataset[index])
                except DataError as error:
                    return error
                except OSError as error:
                    return DataError(f"example {index} of the data set could not be read: {error}")
        try:
            batch = default_collate(examples)
        except (RuntimeError, TypeError) as error:
            return DataError(
                f"examples of the data set cannot be put into one batch ({str(error).splitlines()[0]}): pass "
                "a DataLoader with a collate_fn of your own"
            )
        weights = batch_weights(batch)
        given = split_batch(batch) if weights is None else (*split_batch(batch), weights)
        inputs, *others = slice_batch(given, 0, len(job.indices))
        if self.transform is not None:
            inputs = self.transform(inputs, torch.Generator().manual_seed(job.seed))
        return inputs, *others


def lost_worker(error: BaseException) -> DataError | None:
    """Return one sentence for an error that says that a worker process was killed, None for another error.

    torch says so itself, from a signal handler and thus anywhere; but if the process dies while it hands over
    a batch, the error is that of a broken connection.
    """
    told = (str(error).splitlines() or [""])[0] or type(error).__name__
    if isinstance(error, RuntimeError):
        if not told.startswith("DataLoader worker"):
            return None
    elif not (isinstance(error, _BROKEN) and _raised_in(error).startswith("multiprocessing.")):
        return None
    return DataError(
        f"a process that reads the data has ended ({told.rstrip('. ')}): a system with too little memory "
        "kills it; use fewer workers or smaller batches, then start again with --resume"
    )


def _raised_in(error: BaseException) -> str:
    """Return the name of the module that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


@contextmanager
def live_workers() -> Iterator[None]:
    """Turn errors about a worker process that was killed into one sentence, as `lost_worker` does."""
    try:
        yield
    except (RuntimeError, *_BROKEN) as error:
        lost = lost_worker(error)
        if lost is None:
            raise
        raise lost from error


def next_batch(batches: Iterator[Any], end: Any) -> Any:
    """Return the next of a loader's batches, or `end`; if a worker was killed, the others end, too.

    As long as the iterator lives, torch tells of a dead worker again at every signal, and the frames of an
    error keep it alive.
    """
    try:
        with live_workers():
            return next(batches, end)
    except DataError:
        getattr(batches, "_shutdown_workers", lambda: None)()
        raise


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the global generators after the block."""
    state = generator_state(torch.default_generator), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
