"""The loader for data that fit in memory: batches by index, no copies, no worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.batch import Inputs, batch_len, map_tensors
from torchbayes.data.order import EpochLoader

__all__ = ["BatchLoader"]


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

    Example:
        >>> loader = BatchLoader(torch.arange(5), None, 2, shuffle=False, seed=0)
        >>> [inputs.tolist() for inputs, _ in loader.batches(0, start=1)]
        [[2, 3], [4]]
    """

    def __init__(
        self, inputs: Inputs, targets: Tensor | None, batch_size: int, *, shuffle: bool, seed: int,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        drop_last: bool = False, rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        count = batch_len(inputs)
        super().__init__(count, batch_size, shuffle, seed, transform, drop_last, rank, world_size)
        if targets is not None and len(targets) != self.num_examples:
            raise ValueError(
                f"there are {self.num_examples} inputs but {len(targets)} targets: "
                "give one target per example"
            )
        self.inputs = inputs
        self.targets = targets

    def _read(self, epoch: int, plan: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[Any, Any]]:
        generator = torch.Generator()
        for batch, index in plan:
            inputs = map_tensors(self.inputs, partial(_select, index=index))
            if self.transform is not None:
                generator.manual_seed(self._augment_seed(epoch, batch))
                inputs = self.transform(inputs, generator)
            yield inputs, None if self.targets is None else _select(self.targets, index)


def _select(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.index_select(0, index.to(tensor.device))
