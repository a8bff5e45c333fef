"""Updates of many cheap operations, done block by block so that each block is read from memory once.

An operation on a large tensor waits for the memory, and an operation on a small one for its call. So a
large tensor is cut into blocks that stay in the processor's cache from the first operation to the last,
and small tensors are copied together into one block, unless they lie together in memory already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["Workspace"]

# Entries in a block: few enough for a handful of tensors in a core's cache, enough to make the calls cheap.
# Other devices want few and large calls.
_CPU_BLOCK = 1 << 17
_OTHER_BLOCK = 1 << 24


class Workspace:
    """Memory that is kept from step to step: filling a fresh large tensor costs more than computing in it.

    Example:
        >>> import torch
        >>> from torchbayes.core.workspace import Workspace
        >>> weights, gradients = [torch.ones(2), torch.ones(1, 1)], [torch.ones(2), torch.zeros(1, 1)]
        >>> for (theta,), (grad,) in Workspace().blocks([weights], [gradients]):
        ...     _ = theta.sub_(grad)
        >>> weights
        [tensor([0., 0.]), tensor([[1.]])]
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def buffer(self, name: str, like: Tensor, size: int) -> Tensor:
        """A flat tensor with arbitrary content, the same memory whenever it has the same name."""
        key = (name, like.device, like.dtype)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            self._kept[key] = kept = torch.empty(size, dtype=like.dtype, device=like.device)
        return kept if kept.numel() == size else kept[:size]

    def blocks(
        self, changed: Sequence[Sequence[Tensor]], given: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Go through lists of tensors of matching shapes, as flat tensors of one length at a time.

        Args:
            changed: Lists of tensors to change; what is done to a block in place is done to them.
            given: Lists of tensors to read.

        Yields:
            A flat tensor for each list of `changed`, and one for each list of `given`.
        """
        first = changed[0][0]
        limit = _CPU_BLOCK if first.device.type == "cpu" else _OTHER_BLOCK
        small: list[int] = []
        for i, tensor in enumerate(changed[0]):
            # Below half a block, copying costs less than the calls; in another order of entries, it must be.
            alone = len(changed[0]) == 1 or 2 * tensor.numel() >= limit
            if not (alone and all(c[i].is_contiguous() for c in changed)):
                small.append(i)
                continue
            flat = [c[i].view(-1) for c in changed] + [g[i].reshape(-1) for g in given]
            for parts in zip(*(t.split(limit) for t in flat), strict=True):
                yield list(parts[: len(changed)]), list(parts[len(changed) :])
        for some in _packed(small, [t.numel() for t in changed[0]], limit):
            yield from self._gathered(
                [[c[i] for i in some] for c in changed], [[g[i] for i in some] for g in given]
            )

    def _gathered(
        self, changed: list[list[Tensor]], given: list[list[Tensor]]
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        sizes = [t.numel() for t in changed[0]]
        there = [_neighbours(column) for column in [*changed, *given]]
        flat = [
            torch.cat(
                [t.reshape(-1) for t in column],
                out=self.buffer(f"gathered {number}", column[0], sum(sizes)),
            )
            if whole is None
            else whole
            for number, (column, whole) in enumerate(zip([*changed, *given], there, strict=True))
        ]
        yield flat[: len(changed)], flat[len(changed) :]
        for column, result, whole in zip(changed, flat, there, strict=False):
            if whole is None:
                parts = zip(result.split(sizes), column, strict=True)
                torch._foreach_copy_(column, [part.view(t.shape) for part, t in parts])


def _neighbours(column: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one after the other in one memory, as the flat tensor that they are parts of."""
    first = column[0]
    memory, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in column:
        if (
            tensor.storage_offset() != place
            or tensor.untyped_storage().data_ptr() != memory
            or not tensor.is_contiguous()
        ):
            return None
        place += tensor.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))


def _packed(places: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Runs of tensors of together at most `limit` entries, or of a single one."""
    some: list[int] = []
    total = 0
    for i in places:
        if some and total + sizes[i] > limit:
            yield some
            some, total = [], 0
        some.append(i)
        total += sizes[i]
    if some:
        yield some
