"""One pass over the training data: the sums that a structure needs, resumable and shared over processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from torchbayes.core import distributed
from torchbayes.core.batch import batch_len, call, slice_batch, split_batch, to_device
from torchbayes.core.storage import PosteriorFileError, read_tensors, write_tensors
from torchbayes.curvature import Tape
from torchbayes.laplace.checks import Some
from torchbayes.laplace.kronecker import Kronecker
from torchbayes.laplace.outputs import Observed, columns
from torchbayes.laplace.structure import Structure, record_size
from torchbayes.posterior.partial import digest_of_rest

__all__ = ["Batches", "Checkpoint", "gather"]

_KIND = "laplace-statistics"
# Inputs and gradients of the layers that a piece of a batch holds. Larger ones leave the cache.
_PIECE = 12 << 20
CHECKPOINT_SECONDS = 30.0
"""Time between two files of a pass."""


class Batches:
    """The training data, batch by batch and in the same order every time; of a process, its own share.

    Args:
        data: A pair (inputs, targets), a map-style data set, or an iterable of batches such as a loader.
        batch_size: Examples per batch for a pair or a data set.
    """

    def __init__(self, data: Any, batch_size: int) -> None:
        self.rank, self.world = distributed.rank(), distributed.world_size()
        self.size: int | None = None
        self.shuffled = False
        if hasattr(data, "inputs") and hasattr(data, "targets") and not hasattr(data, "__iter__"):
            data = (data.inputs, data.targets)  # a Split
        if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor):
            self._source: Iterable[Any] = _Pair(data[0], data[1], batch_size)
            self.size = len(data[1])
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            self._source = DataLoader(data, batch_size)
            self.size = len(data)  # type: ignore[arg-type]
        elif isinstance(data, Iterable) and not isinstance(data, (Tensor, str, dict)):
            self._source = data
            self._ask(data)
        else:
            raise TypeError(
                f"cannot take a {type(data).__name__} as training data: pass a pair of tensors (inputs, "
                "targets), a data set or a loader"
            )

    def _ask(self, loader: Any) -> None:
        """Learn from a loader how many examples it has, and whether it has shared them out by itself."""
        own = getattr(loader, "world_size", 1)
        sampler = getattr(loader, "sampler", None)
        if own > 1 or isinstance(sampler, DistributedSampler):
            self.rank, self.world = 0, 1
        self.shuffled = isinstance(sampler, RandomSampler) or bool(
            getattr(loader, "shuffle", False)
        )
        size = getattr(loader, "num_examples", None)
        if size is None and isinstance(loader, DataLoader) and not isinstance(
            loader.dataset, IterableDataset
        ):  # fmt: skip
            size = len(loader.dataset)  # type: ignore[arg-type]
        self.size = size

    def __len__(self) -> int:
        """Return the number of batches of all processes; 0 if it is not known."""
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return 0

    def first(self) -> tuple[Any, Tensor]:
        """Return the first batch."""
        for batch in self._source:
            if iter(self._source) is self._source:  # an iterator, which gives it only once
                self._source = chain([batch], self._source)
            return _with_targets(batch)
        raise ValueError("the training data have no batches: Laplace needs at least one example")

    def each(self, start: int) -> Iterator[tuple[int, Any, Tensor]]:
        """Yield (index, inputs, targets) of this process's batches from number `start` on."""
        for index, batch in enumerate(self._source):
            if index >= start and index % self.world == self.rank:
                yield index, *_with_targets(batch)


def _with_targets(batch: Any) -> tuple[Any, Tensor]:
    inputs, targets = split_batch(batch)
    if targets is None:
        raise ValueError("the training data have no targets: give pairs of inputs and targets")
    return inputs, targets


class _Pair:
    def __init__(self, inputs: Any, targets: Tensor, size: int) -> None:
        if batch_len(inputs) != len(targets):
            raise ValueError(
                f"there are {batch_len(inputs)} inputs but {len(targets)} targets: give one target per input"
            )
        self.inputs, self.targets, self.size = inputs, targets, size

    def __len__(self) -> int:
        return -(-len(self.targets) // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.targets), self.size):
            stop = start + self.size
            yield slice_batch(self.inputs, start, stop), self.targets[start:stop]


class Checkpoint:
    """The sums so far, in a file, so that a pass that was stopped goes on where it was.

    Args:
        folder: Folder of the file; nothing is written if None.
        model: The network.
        settings: What the sums depend on besides the network and the data.
    """

    def __init__(
        self, folder: str | Path | None, model: nn.Module, settings: dict[str, Any]
    ) -> None:
        rank = distributed.rank()
        name = (
            "laplace.safetensors"
            if distributed.world_size() == 1
            else f"laplace-{rank}.safetensors"
        )
        self.path = None if folder is None else Path(folder) / name
        self._settings = settings
        if self.path is not None:
            self._settings = settings | {"digest": digest_of_rest(model, [])}
        self._model_name = type(model).__name__
        self._saved = time.monotonic()

    def load(
        self, structure: Structure, observed: Observed, generator: torch.Generator
    ) -> tuple[int, bool]:
        """Restore the sums; return the next batch's number and whether the pass was finished."""
        if self.path is None or not self.path.exists():
            return 0, False
        header, tensors = read_tensors(self.path)
        settings = header["settings"]
        for name, value in self._settings.items():
            if header["kind"] != _KIND or settings.get(name) != value:
                raise PosteriorFileError(
                    f"{self.path} has the statistics of another Laplace posterior ({name} is "
                    f"{settings.get(name)!r}, not {value!r}): choose another folder or delete it"
                )
        device = next(iter(structure.weights.values())).device
        generator.set_state(tensors.pop("generator"))
        # Copies in torch's own alignment: a product's last bit may depend on it.
        structure.sums = {name: tensor.to(device).clone() for name, tensor in tensors.items()}
        if isinstance(structure, Kronecker):
            structure.biases = dict(settings["biases"])
        observed.examples, observed.count = settings["examples"], settings["count"]
        observed.total = settings["total"]
        return settings["batches"], settings["finished"]

    def save(
        self, structure: Structure, observed: Observed, generator: torch.Generator, batches: int,
        finished: bool,
    ) -> None:  # fmt: skip
        """Write the sums if it is time to, or if the pass is finished."""
        if self.path is None or not (
            finished or time.monotonic() - self._saved >= CHECKPOINT_SECONDS
        ):
            return
        about = {
            "examples": observed.examples, "count": observed.count, "total": observed.total,
            "batches": batches, "finished": finished,
            "biases": structure.biases if isinstance(structure, Kronecker) else {},
        }  # fmt: skip
        write_tensors(
            self.path, structure.sums | {"generator": generator.get_state()}, kind=_KIND,
            model_name=self._model_name, settings=self._settings | about,
        )  # fmt: skip
        self._saved = time.monotonic()


def _piece_size(model: nn.Module, tape: Tape, inputs: Any) -> int:
    """Return the number of examples whose records have about `_PIECE` bytes."""
    with tape.block():
        outputs = call(model, slice_batch(inputs, 0, 1))
        with torch._C.DisableTorchFunction():
            records = tape.backward(outputs, torch.ones_like(outputs))
    count = sum(sum(record_size(record)) for record in records.values())
    return max(1, int(_PIECE // max(1, count * outputs.element_size())))


@torch.no_grad()
def _add(structure: Structure, tape: Tape, outputs: Tensor, column: Tensor, first: bool) -> None:
    if structure.streams:
        tape.stream(outputs, column, lambda name, record: structure.add({name: record}, first))
    else:
        structure.add(tape.backward(outputs, column), first)


def gather(
    model: nn.Module, structure: Structure, observed: Observed, batches: Batches, kind: str,
    generator: torch.Generator, samples: int, checkpoint: Checkpoint, some: Some,
) -> None:  # fmt: skip
    """Go through the training data once.

    Args:
        model: The network, in evaluation mode.
        structure: Receives the curvature.
        observed: Receives the log-likelihood.
        batches: The data.
        kind: Curvature, as for `columns`.
        generator: Source of the labels of `"sampled"`.
        samples: Number of labels of `"sampled"`.
        checkpoint: Where sums are kept.
        some: Receives some of the examples.
    """
    device = next(iter(structure.weights.values())).device
    start, finished = checkpoint.load(structure, observed, generator)
    if start and batches.shuffled:
        raise ValueError(
            "the data loader gives another order at every pass, so that this one cannot be resumed: give a "
            "loader without shuffling, or delete the folder's file"
        )
    if not finished:
        tape = Tape(model, structure.weights)
        index, size = start - 1, 0
        for index, inputs, targets in batches.each(start):
            inputs, targets = to_device(inputs, device), targets.to(device)
            some.add(inputs, targets)
            size = size or _piece_size(model, tape, inputs)
            for first in range(0, len(targets), size):
                piece = slice_batch(inputs, first, first + size)
                labels = targets[first : first + size]
                with tape.block():
                    outputs = call(model, piece)
                    fixed = outputs.detach()
                    observed.add(fixed, labels)
                    made = columns(kind, observed.likelihood, fixed, labels, generator, samples)
                    with torch._C.DisableTorchFunction():
                        for place, column in enumerate(made):
                            _add(structure, tape, outputs, column, place == 0)
            checkpoint.save(structure, observed, generator, index + 1, False)
        checkpoint.save(structure, observed, generator, index + 1, True)
    if distributed.any_of([observed.examples == 0])[0]:
        raise ValueError(
            f"there are fewer batches than the {distributed.world_size()} processes: give a smaller "
            "batch_size"
        )
    if batches.world > 1 or distributed.world_size() > 1:
        structure.reduce()
        facts = torch.tensor(
            [observed.examples, observed.count, observed.total], dtype=torch.float64, device=device
        )
        distributed.sum_packed([facts])
        observed.examples, observed.count = int(facts[0]), int(facts[1])
        observed.total = float(facts[2])
    structure.finish()
