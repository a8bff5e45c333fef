"""One pass over the training data: the sums that a structure needs, resumable and shared over processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from torchbayes.core import distributed
from torchbayes.core.arrays import in_memory, is_array
from torchbayes.core.batch import as_labels, batch_len, batch_weights, slice_batch, split_batch
from torchbayes.core.device import generator_state
from torchbayes.core.storage import PosteriorFileError, read_tensors, write_tensors
from torchbayes.curvature import Tape
from torchbayes.laplace.checks import Some
from torchbayes.laplace.kronecker import Kronecker
from torchbayes.laplace.network import Network
from torchbayes.laplace.outputs import Observed, columns, factors_of
from torchbayes.laplace.structure import Structure, record_size
from torchbayes.likelihood import Categorical, Likelihood
from torchbayes.posterior.partial import digest_of_rest

__all__ = ["Batches", "Checkpoint", "gather"]

_KIND = "laplace-statistics"
# Inputs and gradients of the layers that a piece of a batch holds. Larger ones take memory, smaller ones
# time: every column is a call of every layer.
_PIECE = 12 << 20
CHECKPOINT_SECONDS = 30.0
"""Time between two files of a pass."""


class Batches:
    """The training data, batch by batch and in the same order every time; of a process, its own share.

    Args:
        data: A pair (inputs, targets) of tensors, arrays or frames, with weights of the examples as a third
            entry if there are any, or a dictionary with the targets among them; a map-style data set; or an
            iterable of batches such as a loader.
        batch_size: Examples per batch for a pair or a data set.

    Attributes:
        size: Number of examples, if it is known.
        shuffled: Whether the order is another one in every pass.
        targets: The targets of all examples, if they are in memory.
    """

    def __init__(self, data: Any, batch_size: int) -> None:
        self.rank, self.world = distributed.rank(), distributed.world_size()
        self.size: int | None = None
        self.shuffled = False
        if hasattr(data, "inputs") and hasattr(data, "targets") and not hasattr(data, "__iter__"):
            data = (data.inputs, data.targets)  # a Split
        self.targets: Tensor | None = None
        given = None if _alone(data) else in_memory(data)
        if given is not None:
            self._source: Iterable[Any] = _Pair(*given, batch_size)
            self.targets, self.size = given[1], len(given[1])
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            self._source = DataLoader(data, batch_size)
            self.size = len(data)  # type: ignore[arg-type]
        elif isinstance(data, Iterable) and not _alone(data):
            self._source = data
            self._ask(data)
        else:
            raise TypeError(
                f"cannot take a {type(data).__name__} as training data: pass a pair (inputs, targets), a "
                "data set or a loader"
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

    def first(self) -> tuple[Any, Tensor, Tensor | None]:
        """Return the first batch: inputs, targets and weights, if there are any."""
        for batch in self._source:
            if iter(self._source) is self._source:  # an iterator, which gives it only once
                self._source = chain([batch], self._source)
            return _with_targets(batch)
        raise ValueError("the training data have no batches: Laplace needs at least one example")

    def each(self, start: int) -> Iterator[tuple[int, Any, Tensor, Tensor | None]]:
        """Yield (index, inputs, targets, weights) of this process's batches from number `start` on."""
        for index, batch in enumerate(self._source):
            if index >= start and index % self.world == self.rank:
                yield index, *_with_targets(batch)


def _alone(data: Any) -> bool:
    """Whether data are inputs without targets, or none at all."""
    return isinstance(data, (Tensor, str)) or is_array(data)


def _with_targets(batch: Any) -> tuple[Any, Tensor, Tensor | None]:
    inputs, targets = split_batch(batch)
    if targets is None:
        raise ValueError("the training data have no targets: give pairs of inputs and targets")
    return inputs, as_labels(targets), batch_weights(batch)


class _Pair:
    def __init__(self, inputs: Any, targets: Tensor, weights: Tensor | None, size: int) -> None:
        if batch_len(inputs) != len(targets):
            raise ValueError(
                f"there are {batch_len(inputs)} inputs but {len(targets)} targets: give one target per input"
            )
        self.inputs, self.targets, self.weights, self.size = inputs, targets, weights, size

    def __len__(self) -> int:
        return -(-len(self.targets) // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.targets), self.size):
            stop = start + self.size
            pair = slice_batch(self.inputs, start, stop), self.targets[start:stop]
            yield pair if self.weights is None else (*pair, self.weights[start:stop])


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
        numbers = [settings.get(name) for name in ("examples", "count", "total", "batches")]
        try:
            if not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
                raise ValueError("its counts are no numbers")
            if not isinstance(settings.get("finished"), bool) or not isinstance(
                settings.get("biases"), dict
            ):
                raise ValueError("its entries are of other types")
            generator.set_state(tensors.pop("generator"))
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise PosteriorFileError(
                f"{self.path} is damaged ({str(error).splitlines()[0]}): delete it to gather it again"
            ) from error
        device = next(iter(structure.weights.values())).device
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
            self.path, structure.sums | {"generator": generator_state(generator)}, kind=_KIND,
            model_name=self._model_name, settings=self._settings | about,
        )  # fmt: skip
        self._saved = time.monotonic()


def _piece_size(
    network: Network, tape: Tape, inputs: Any, kind: str, likelihood: Likelihood
) -> int:
    """Return the number of examples whose records and Hessians have about `_PIECE` bytes."""
    with tape.block():
        outputs = network(slice_batch(inputs, 0, 1))
        with torch._C.DisableTorchFunction():
            records = tape.backward(outputs, torch.ones_like(outputs))
    count = sum(sum(record_size(record)) for record in records.values())
    size = count * outputs.element_size()
    if kind == "ggn" and isinstance(likelihood, Categorical):
        size += 3 * 8 * outputs.shape[1] ** 2  # in double precision, with eigenvectors and a copy
    return max(1, int(_PIECE // max(1, size)))


@torch.no_grad()
def _add(
    structure: Structure, tape: Tape, outputs: Tensor, column: Tensor, first: bool,
    weights: Tensor | None,
) -> None:  # fmt: skip
    if structure.streams:
        tape.stream(
            outputs, column, lambda name, record: structure.add({name: record}, first, weights)
        )
    else:
        structure.add(tape.backward(outputs, column), first, weights)


def gather(
    network: Network, structure: Structure, observed: Observed, batches: Batches, kind: str,
    generator: torch.Generator, samples: int, checkpoint: Checkpoint, some: Some,
) -> None:  # fmt: skip
    """Go through the training data once.

    Args:
        network: The network.
        structure: Receives the curvature.
        observed: Receives the log-likelihood.
        batches: The data.
        kind: Curvature, as for `columns`.
        generator: Source of the labels of `"sampled"`.
        samples: Number of labels of `"sampled"`.
        checkpoint: Where sums are kept.
        some: Receives some of the examples.
    """
    device = network.device
    start, finished = checkpoint.load(structure, observed, generator)
    if start and not finished and batches.shuffled:
        raise ValueError(
            "the data loader gives another order at every pass, so that this one cannot be resumed: give a "
            "loader without shuffling, or delete the folder's file"
        )
    tape = Tape(network.model, structure.weights)
    index, size = start - 1, 0
    for index, inputs, targets, weights in batches.each(0):
        known = finished or index < start
        if known and some.full:
            if finished:
                break
            continue
        inputs, targets = network.suited(inputs), targets.to(device)
        weights = None if weights is None else weights.to(device)
        some.add(inputs, targets, weights)
        if known:
            continue
        size = size or _piece_size(network, tape, inputs, kind, observed.likelihood)
        for first in range(0, len(targets), size):
            piece = slice_batch(inputs, first, first + size)
            labels = targets[first : first + size]
            own = None if weights is None else weights[first : first + size]
            with tape.block():
                outputs = network(piece)
                fixed = outputs.detach()
                factors = factors_of(observed.likelihood, fixed, labels, own)
                observed.add(fixed, labels, own, factors)
                made = columns(
                    kind, observed.likelihood, fixed, labels, generator, samples, factors
                )
                each = None if factors is None else factors.reshape(len(fixed), -1).mean(1)
                with torch._C.DisableTorchFunction():
                    for place, column in enumerate(made):
                        _add(structure, tape, outputs, column, place == 0, each)
            del outputs  # its graph, before the next piece makes another
        checkpoint.save(structure, observed, generator, index + 1, False)
    if not finished:
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
        observed.examples = int(facts[0])
        observed.count, observed.total = float(facts[1]), float(facts[2])
    if observed.count == 0:
        raise ValueError(
            "every training example is ignored or has the weight 0: Laplace needs some that count"
        )
    structure.finish()
