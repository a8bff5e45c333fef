"""Which examples are in which batch, on which rank, and with what randomness.

Nothing here has state that a checkpoint would have to carry: the order of an epoch is a function of
(seed, epoch), the augmentation of a batch one of (seed, epoch, batch, rank), and the numbers a data
set draws for one example one of (seed, epoch, index). A run that resumes at batch k of epoch e
therefore sees, bit for bit, what an uninterrupted run would have seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["EpochLoader", "mixed_seed", "share"]

# First entry of every key, so that the three streams of one seed never coincide.
ORDER, AUGMENT, EXAMPLE = 0, 1, 2


def mixed_seed(*key: int) -> int:
    """Mix integers into one seed: neighbouring keys give unrelated seeds.

    torch's CPU generator keeps 32 bits of a seed; NumPy's SeedSequence mixes well into those, whereas
    sums or products of the entries would collide.

    Example:
        >>> mixed_seed(0, 1) != mixed_seed(1, 0)
        True
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])


def share(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the contiguous range of `count` examples that belongs to `rank`.

    The ranges of all ranks cover every example once and differ in size by at most one.

    Example:
        >>> [share(10, rank, 4) for rank in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return count * rank // world_size, count * (rank + 1) // world_size


class EpochLoader(ABC):
    """Base of the in-memory and the streaming loader: the plan of an epoch.

    Attributes:
        splits: Whether batches are slices of the data along the first dimension.

    Args:
        num_examples: Size of the data set, over all ranks.
        batch_size: Examples per global batch, which the ranks share.
        shuffle: Whether to draw a new random order for each epoch.
        seed: Non-negative seed of order and augmentation.
        transform: Called with a batch of inputs and a generator.
        drop_last: Whether to drop an incomplete last batch.
        rank: Rank of this process.
        world_size: Number of processes that share each batch.

    Attributes:
        independent: Whether every batch is drawn from all the data, independently of the others, instead of
            going through a random order once per epoch.
        doubt: Why a resumed run may see other batches than one that was never stopped; None if it cannot.
    """

    doubt: str | None = None
    splits = True
    independent = False

    def __init__(
        self, num_examples: int, batch_size: int, shuffle: bool, seed: int,
        transform: Callable[[Any, torch.Generator], Any] | None,
        drop_last: bool, rank: int, world_size: int,
    ) -> None:  # fmt: skip
        if num_examples < 1:
            raise ValueError("a loader needs at least one example, but the data set is empty")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: expected 1 or more")
        if seed < 0:
            raise ValueError(f"seed is {seed}: expected 0 or more")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: expected 0 to world_size - 1 = {world_size - 1}")
        if batch_size < world_size:
            raise ValueError(
                f"batch_size is {batch_size}, which {world_size} processes cannot share: "
                f"give at least {world_size}"
            )
        if drop_last and batch_size > num_examples:
            raise ValueError(
                f"drop_last leaves no batch of {batch_size} from {num_examples} examples: "
                "give a smaller batch_size"
            )
        self.num_examples, self.batch_size, self.drop_last = num_examples, batch_size, drop_last
        self.shuffle, self.seed, self.transform = shuffle, seed, transform
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def __len__(self) -> int:
        """Return the number of global batches per epoch, the same on every rank."""
        whole, rest = divmod(self.num_examples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the next epoch: the first iteration is epoch 0, then 1, and so on."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.batches(epoch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, ...]]:
        """Iterate over the `(inputs, targets)` of one epoch, from batch `start` on.

        A loader with weights of the examples gives them as a third entry. With `world_size` > 1 these are
        this rank's shares. The last share of an epoch is empty on some ranks if the last batch has fewer
        examples than there are ranks.

        Args:
            epoch: Number of the epoch, which determines order and augmentation.
            start: Number of batches to skip without reading them.
        """
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}: expected 0 or more")
        if not 0 <= start <= len(self):
            raise ValueError(
                f"start is {start}: expected 0 to {len(self)}, the batches of an epoch"
            )
        return self._read(epoch, self._plan(epoch, start))

    def peek(self) -> tuple[Any, Any]:
        """Return the first batch of the first epoch."""
        return next(iter(self.batches(0)))

    def smallest_share(self) -> int:
        """Return the smallest number of examples, above 0, that a process gets of a batch."""
        last = self.num_examples - (len(self) - 1) * self.batch_size
        sizes = {min(self.batch_size, self.num_examples), min(last, self.batch_size)}
        return min(max(1, size // self.world_size) for size in sizes)

    def leave_out_last(self) -> str | None:
        """Leave the incomplete last batch out of every epoch, or say what the user has to do."""
        if min(self.batch_size, self.num_examples) // self.world_size <= 1:
            least = 2 * self.world_size
            return f"give a batch_size of at least {least} and as many examples"
        self.drop_last = True
        return None

    def weight(self, batch: int, count: int) -> float:
        """Return the fraction of a global batch that this process has.

        Args:
            batch: Number of the batch.
            count: Examples of it that this process has.
        """
        first = batch * self.batch_size
        return count / min(self.batch_size, self.num_examples - first)

    def _plan(self, epoch: int, start: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each batch and the indices of this rank's share."""
        if self.shuffle and self.independent and self.batch_size < self.num_examples:
            yield from self._independent(epoch, start)
            return
        if self.shuffle:
            generator = torch.Generator().manual_seed(mixed_seed(ORDER, self.seed, epoch))
            order = torch.randperm(self.num_examples, generator=generator)
        else:
            order = torch.arange(self.num_examples)
        for batch in range(start, len(self)):
            first = batch * self.batch_size
            count = min(self.batch_size, self.num_examples - first)
            low, high = share(count, self.rank, self.world_size)
            yield batch, order[first + low : first + high]

    def _independent(self, epoch: int, start: int) -> Iterator[tuple[int, Tensor]]:
        """Yield a plan of independent batches, all of them of full size."""
        generator, size = torch.Generator(), self.batch_size
        low, high = share(size, self.rank, self.world_size)
        for batch in range(start, len(self)):
            generator.manual_seed(mixed_seed(ORDER, self.seed, epoch, batch))
            if size < 0.05 * self.num_examples:  # so few that hardly one occurs twice
                index = torch.randint(self.num_examples, (size,), generator=generator)
            else:
                index = torch.randperm(self.num_examples, generator=generator)[:size]
            yield batch, index[low:high]

    def _augment_seed(self, epoch: int, batch: int) -> int:
        return mixed_seed(AUGMENT, self.seed, epoch, batch, self.rank)

    @abstractmethod
    def _read(self, epoch: int, plan: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[Any, ...]]:
        """Read the batches at the plan's indices."""
