"""Loaders that people already have: a torch `DataLoader`, an iterable of batches, a function that makes one.

Their batches are used as they are. What they draw from the global generators of torch, NumPy and Python, and
from the generators of a `DataLoader` and its samplers, is seeded here, so that the order of epoch e is a
function of (seed, e), as for torchbayes' own loaders. Where that cannot be promised, `doubt` says why.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchbayes.core.arrays import as_targets, as_tensors
from torchbayes.core.batch import batch_len, slice_batch, split_batch
from torchbayes.data.order import EXAMPLE, ORDER, EpochLoader, mixed_seed, share
from torchbayes.data.stream import next_batch, restored_generators

__all__ = ["ForeignLoader"]

_END = object()
# Each of these goes through the whole data set, or draws from all of it.
_OF_ALL = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)


class ForeignLoader(EpochLoader):
    """The batches of someone else's loader, as they are.

    Every epoch has the same number of batches: `len(source)`, or what `train_size` and the size of the first
    batch give. A source that ends before that starts again, with a warning.

    Under torchrun, a `DataLoader` with a `DistributedSampler` gives every process its own batches; of any
    other one all processes read the same batches and take their share of each.

    A run that is resumed within an epoch reads the batches again that it has already seen and drops them.

    Args:
        source: A `DataLoader`, an iterable of batches that can be iterated again, or a function that returns
            an iterator over batches.
        seed: Non-negative seed of order and augmentation.
        train_size: Size of the training set; counted if None, which a `DataLoader` over a map-style data set
            allows.
        transform: Called with a batch of inputs and a generator.
        rank: Rank of this process.
        world_size: Number of processes that share the work.
        whole: Read every epoch to its end, whatever its length: for data that are scored, not trained on.

    Attributes:
        doubt: Why a resumed run may see other batches than one that was never stopped; None if it cannot.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(5.0), torch.arange(5))
        >>> loader = ForeignLoader(DataLoader(data, batch_size=2), seed=0)
        >>> loader.num_examples, [targets.tolist() for _, targets in loader.batches(0)]
        (5, [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self, source: Any, *, seed: int, train_size: int | None = None,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        rank: int = 0, world_size: int = 1, whole: bool = False,
    ) -> None:  # fmt: skip
        if isinstance(source, Iterator):
            raise TypeError(
                f"a {type(source).__name__} can be read only once, but training reads its data in every "
                "epoch: pass the loader itself, or the function that makes the iterator"
            )
        self.source, self.whole, self.seed = source, whole, seed
        self.rank, self.world_size = rank, world_size
        self.doubt = _doubt(source)
        self._distributed = any(isinstance(s, DistributedSampler) for s in _samplers(source))
        self._check_processes()
        first = next(self._pass(0, 0), _END)
        if first is _END:
            raise ValueError(f"the {_name(source)} has no batches: give at least one example")
        ready = self._ready(first)
        size = self._length
        counted = _examples(source) if train_size is None else train_size
        if counted is None and not whole:
            raise ValueError(
                f"the {_name(source)} cannot tell how many training examples there are: give train_size=…"
            )
        super().__init__(
            size if counted is None else counted, size * (world_size if self._distributed else 1), True,
            seed, transform, False, rank, world_size,
        )  # fmt: skip
        self._first = self._transformed(ready, 0, 0)
        self._steps = self._count_steps(size)
        self._warned, self._counted = False, train_size is None

    def _check_processes(self) -> None:
        if self._distributed and self.world_size == 1 and _replicas(self.source) > 1:
            raise ValueError(
                "the loader's DistributedSampler gives every process a part of the data, but here every "
                "process needs all of them: leave the sampler out"
            )
        if self.world_size > 1 and not self._distributed and self.doubt is not None:
            raise ValueError(
                f"{self.world_size} processes might read different batches ({self.doubt}): give the "
                "DataLoader sampler=DistributedSampler(dataset), so that each reads its own part"
            )

    def _count_steps(self, first: int) -> int:
        try:
            return len(self.source)
        except TypeError:  # a function, or a stream
            exact = self.num_examples / (first * (self.world_size if self._distributed else 1))
            down = isinstance(self.source, DataLoader) and self.source.drop_last
            return max(1, math.floor(exact) if down else math.ceil(exact))

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._steps

    def smallest_share(self) -> int:
        """Return the smallest number of examples that a process gets of a batch, as far as it is known."""
        source = self.source
        size = None if self._distributed else _examples(source)
        if size is None or not isinstance(source, DataLoader) or not source.batch_size:
            return 2
        last = 0 if source.drop_last else size % source.batch_size
        least = min(size, source.batch_size, last or source.batch_size)
        return max(1, least // self.world_size)

    def leave_out_last(self) -> str | None:
        """Say what the user has to do: the loader's batches are used as they are."""
        return "give the DataLoader drop_last=True, or another batch_size"

    def peek(self) -> tuple[Any, Any]:
        """Return the first batch of the first epoch, which has been read already."""
        return self._first

    def weight(self, batch: int, count: int) -> float:
        """Return the fraction of the last batch's examples that this process has; see `EpochLoader`."""
        return 1 / self.world_size if self._distributed else count / self._length

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """Iterate over the `(inputs, targets)` of one epoch, from batch `start` on; see `EpochLoader`."""
        if self.whole:
            for number, batch in enumerate(self._pass(epoch, 0)):
                yield self._transformed(self._ready(batch), epoch, number)
            return
        number = seen = 0
        while number < self._steps:
            before = number
            # In the first epoch, one batch more is read to find out whether there is one.
            most = self._steps - number + (epoch == 0)
            for batch in itertools.islice(self._pass(epoch, number), most):
                number += 1
                if number > self._steps:
                    self._warn_once(
                        f"the {_name(self.source)} goes on after the {self._steps} batches of an epoch of "
                        f"{self.num_examples} examples: only its beginning is read, see train_size"
                    )
                    return
                if number > start:
                    ready = self._transformed(self._ready(batch), epoch, number - 1)
                    seen += self._length
                    yield ready
            if number == before:
                raise ValueError(f"the {_name(self.source)} has no batches in epoch {epoch + 1}")
            if number < self._steps:
                self._warn_once(
                    f"the {_name(self.source)} ended after {number} of the {self._steps} batches of an epoch "
                    f"of {self.num_examples} examples and starts again: check train_size"
                )
        if epoch == 0 and start == 0:
            self._check_size(seen)

    def _check_size(self, seen: int) -> None:
        """Compare the first epoch with the size of the training set, where nobody has told it."""
        known = any(isinstance(s, _OF_ALL[1:]) for s in _samplers(self.source))
        if self._counted and not known and abs(seen - self.num_examples) > self.batch_size:
            self._warn_once(
                f"an epoch of the {_name(self.source)} has {seen} examples, but its data set "
                f"{self.num_examples}, and their number decides how much the prior weighs: give train_size=…"
            )

    def _warn_once(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(sentence, stacklevel=2)

    def _pass(self, epoch: int, number: int) -> Iterator[Any]:
        """Iterate once over the source; `number` counts the batches of the epoch so far."""
        # All processes read the same batches if they share them.
        own = self.rank if self._distributed else 0
        _reseed(self.source, epoch, mixed_seed(ORDER, self.seed, epoch, number, own))
        iterator: Iterator[Any] | None = None
        for batch in itertools.count(number):
            with restored_generators():
                seed = mixed_seed(EXAMPLE, self.seed, epoch, batch, own)
                torch.default_generator.manual_seed(seed)
                np.random.seed(seed)
                random.seed(seed)
                if iterator is None:
                    iterator = iter(self.source() if _is_function(self.source) else self.source)
                result = next_batch(iterator, _END)
            if result is _END:
                return
            yield result

    def _ready(self, batch: Any) -> tuple[Any, ...]:
        """Split a batch into inputs, targets and what comes after them, and take this process's share."""
        inputs, targets = split_batch(batch)
        inputs, targets = as_tensors(inputs), None if targets is None else as_targets(targets)
        rest = as_tensors(tuple(batch[2:])) if isinstance(batch, (tuple, list)) else ()
        self._length = batch_len(inputs)
        if self.world_size == 1 or self._distributed:
            return inputs, targets, *rest
        low, high = share(self._length, self.rank, self.world_size)
        return tuple(slice_batch((inputs, targets, *rest), low, high))

    def _transformed(self, batch: tuple[Any, ...], epoch: int, number: int) -> tuple[Any, ...]:
        if self.transform is None:
            return batch
        generator = torch.Generator().manual_seed(self._augment_seed(epoch, number))
        return self.transform(batch[0], generator), *batch[1:]

    def _read(self, epoch: int, plan: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[Any, Any]]:
        raise NotImplementedError("a foreign loader makes its own plan")


def _is_function(source: Any) -> bool:
    return callable(source) and not isinstance(source, Iterable)


def _name(source: Any) -> str:
    if isinstance(source, DataLoader):
        return f"{type(source).__name__} over {type(source.dataset).__name__}"
    return f"function {source.__name__!r}" if hasattr(source, "__name__") else type(source).__name__


def _samplers(source: Any) -> list[Any]:
    """Return what chooses the examples of a `DataLoader`."""
    if not isinstance(source, DataLoader) or isinstance(source.dataset, IterableDataset):
        return []
    outer = source.batch_sampler
    found = [outer, getattr(outer, "sampler", None)]
    return [s for s in ([source.sampler] if outer is None else found) if s is not None]


def _replicas(source: Any) -> int:
    found = [s.num_replicas for s in _samplers(source) if isinstance(s, DistributedSampler)]
    return max(found, default=1)


def _reseed(source: Any, epoch: int, seed: int) -> None:
    """Seed the generators that a `DataLoader`, its data set and its samplers keep; tell them the epoch."""
    for part in [source, getattr(source, "dataset", None), *_samplers(source)]:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _examples(source: Any) -> int | None:
    """Count the examples of a training set, or return None where that is not possible."""
    if not isinstance(source, DataLoader):
        return None
    if isinstance(source.dataset, IterableDataset):
        return len(source.dataset) if hasattr(source.dataset, "__len__") else None
    if source.batch_sampler is None:  # the data set's entries are batches
        return None
    size = len(source.dataset)  # type: ignore[arg-type]
    sampler = getattr(source.batch_sampler, "sampler", None)
    if sampler is None or isinstance(sampler, _OF_ALL):
        return size
    chosen = len(sampler) if hasattr(sampler, "__len__") else None
    return chosen if isinstance(sampler, SubsetRandomSampler) or chosen == size else None


def _doubt(source: Any) -> str | None:
    """Say why the batches of an epoch may not be a function of seed and epoch."""
    alone = "may draw random numbers of its own"
    if not isinstance(source, DataLoader):
        return f"a {_name(source)} {alone}"
    if isinstance(source.dataset, IterableDataset):
        return f"an iterable data set, {type(source.dataset).__name__}, {alone}"
    for sampler in _samplers(source):
        known = type(sampler).__module__.startswith("torch.utils.data")
        if not (known or hasattr(sampler, "set_epoch")):
            return f"a sampler of your own, {type(sampler).__name__}, {alone}"
    if source.num_workers and source.persistent_workers:
        return "persistent workers go on with the random numbers of earlier epochs"
    if source.num_workers and not getattr(source, "in_order", True):
        return "with in_order=False batches arrive in any order"
    return None
