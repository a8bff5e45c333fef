"""The loader for data that fit in memory: batches by index, no copies, no worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.batch import Inputs, batch_len, map_tensors
from torchbayes.data.order import EpochLoader

__all__ = ["BatchLoader", "WholeLoader"]


class BatchLoader(EpochLoader):
    """Batches of in-memory tensors, selected by index.

    The order of epoch e depends only on (seed, e), and the augmentation of its batch b only on
    (seed, e, b, rank), so a resumed run is bit-equal to one that was never stopped.

    Args:
        inputs: A tensor, or a tuple or dict of tensors, with one entry per example.
        targets: One entry per example, or None.
        batch_size: Examples per (global) batch.
        shuffle: Whether to draw a new random order for each epoch.
        seed: Non-negative seed of order and augmentation.
        transform: Called with a batch of inputs and a generator; see `torchbayes.data.transform`.
        drop_last: Whether to drop an incomplete last batch.
        rank: Rank of this process.
        world_size: Number of processes that share each batch: rank r gets its r-th contiguous part.
        weights: One weight per example, which a batch then has as its third entry; or None.

    Example:
        >>> loader = BatchLoader(torch.arange(5), None, 2, shuffle=False, seed=0)
        >>> [inputs.tolist() for inputs, _ in loader.batches(0, start=1)]
        [[2, 3], [4]]
    """

    def __init__(
        self, inputs: Inputs, targets: Tensor | None, batch_size: int, *, shuffle: bool, seed: int,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        drop_last: bool = False, rank: int = 0, world_size: int = 1, weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        count = batch_len(inputs)
        super().__init__(count, batch_size, shuffle, seed, transform, drop_last, rank, world_size)
        if targets is not None and len(targets) != self.num_examples:
            raise ValueError(
                f"there are {self.num_examples} inputs but {len(targets)} targets: "
                "give one target per example"
            )
        if weights is not None and weights.shape != (self.num_examples,):
            raise ValueError(
                f"weights have shape {tuple(weights.shape)} for {self.num_examples} examples: give one "
                "weight per example"
            )
        self.inputs = inputs
        self.targets = targets
        self.weights = weights

    def _read(self, epoch: int, plan: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[Any, ...]]:
        generator = torch.Generator()
        for batch, index in plan:
            inputs = map_tensors(self.inputs, partial(_select, index=index))
            if self.transform is not None:
                generator.manual_seed(self._augment_seed(epoch, batch))
                inputs = self.transform(inputs, generator)
            targets = None if self.targets is None else _select(self.targets, index)
            if self.weights is None:
                yield inputs, targets
            else:
                yield inputs, targets, _select(self.weights, index)


class WholeLoader(EpochLoader):
    """One batch per epoch, passed whole, of inputs that cannot be cut along the first dimension.

    Args:
        inputs: Any inputs of a model, such as the features and the adjacency matrix of a graph.
        targets: Targets, one for each row of the model's outputs.
        seed: Non-negative seed of the augmentation.
        transform: Called with the inputs and a generator.
        weights: One weight per target, or None.
        world_size: Number of processes, which cannot share a batch: 1.

    Example:
        >>> graph = (torch.zeros(3, 4), torch.eye(3))
        >>> loader = WholeLoader(graph, torch.tensor([0, 1, -100]), seed=0)
        >>> len(loader), [len(inputs) for inputs, _ in loader]
        (1, [2])
    """

    splits = False

    def __init__(
        self, inputs: Inputs, targets: Tensor, *, seed: int,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        weights: Tensor | None = None, world_size: int = 1,
    ) -> None:  # fmt: skip
        if world_size > 1:
            raise ValueError(
                f"{world_size} processes cannot share inputs that are passed whole: train with one process"
            )
        super().__init__(len(targets), len(targets), False, seed, transform, False, 0, 1)
        self.inputs, self.targets, self.weights = inputs, targets, weights

    def _read(self, epoch: int, plan: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[Any, ...]]:
        for batch, _ in plan:
            inputs = self.inputs
            if self.transform is not None:
                seed = self._augment_seed(epoch, batch)
                inputs = self.transform(inputs, torch.Generator().manual_seed(seed))
            given = (inputs, self.targets)
            yield given if self.weights is None else (*given, self.weights)


def _select(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.index_select(0, index.to(tensor.device))
