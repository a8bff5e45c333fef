"""Reused memory, and updates of many cheap operations that read each block of it once.

A new large tensor pays for the pages that the system maps for it: on the build machine up to five times the
cost of writing into a kept one. And an operation on a large tensor is bound by memory, one on a small tensor
by its call. So buffers are kept; a large tensor is cut into blocks that stay in the processor's cache from
the first operation to the last; and small tensors are copied together into one block, unless they are
already adjacent in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from torchbayes import kernels
from torchbayes.core.noise import normals_, slices_of_normals_
from torchbayes.core.shards import is_sharded, local, span

__all__ = ["BLOCK", "LARGE", "Workspace", "blocks", "first_nonfinite"]

BLOCK = 1 << 17
"""Entries in a block: a handful of tensors of that size fit in a core's cache, and calls are still cheap."""

LARGE = BLOCK // 2
"""Entries from which a tensor is not copied together with others: the calls cost less than copying it."""

# Other devices prefer few, large calls.
_OTHER_BLOCK = 1 << 24

# Older builds of torch have it only with CUDA. Without it `take` reuses nothing; all else is the same.
_use_count = getattr(torch._C, "_storage_Use_Count", None)


def _references(tensor: Tensor) -> int:
    return -1 if _use_count is None else int(_use_count(tensor.untyped_storage()._cdata))


_UNUSED = max(0, _references(torch.empty(1)))


class Workspace:
    """Kept memory: buffers by name, and tensors that return by themselves; and updates that use it.

    A copy or pickle of a workspace is empty.

    Example:
        >>> import torch
        >>> from torchbayes.core.workspace import Workspace
        >>> def descend(theta, grad, *, lr):
        ...     theta.sub_(grad, alpha=lr)
        >>> weights, gradients = [torch.ones(2), torch.ones(1, 1)], [torch.ones(2), torch.zeros(1, 1)]
        >>> Workspace().apply(descend, [weights], [gradients], lr=1.0)
        >>> weights
        [tensor([0., 0.]), tensor([[1.]])]
    """

    def __init__(self) -> None:
        self._named: dict[Any, Tensor] = {}
        self._taken: dict[Any, list[Tensor]] = {}

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()

    # Memory.

    def get(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor with arbitrary content, valid until the name is requested again."""
        key = (name, like.device, like.dtype)
        count = torch.Size(shape).numel()
        flat = self._named.get(key)
        if flat is None or flat.numel() < count:
            self._named[key] = flat = torch.empty(count, dtype=like.dtype, device=like.device)
        return flat[:count].view(shape)

    def twin(self, name: str, tensor: Tensor) -> Tensor:
        """Like `get`, with the shape and memory layout of a tensor that lives as long as the workspace."""
        key = (name, id(tensor), tensor.device, tensor.dtype)
        kept = self._named.get(key)
        if kept is None:
            self._named[key] = kept = torch.empty_like(tensor, requires_grad=False)
        return kept

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor with arbitrary content, the caller's while anything refers to its memory.

        It is reused when nothing does any more: no saved tensor of a graph, no `.grad`, no view.

        Args:
            count: Number of elements.
            dtype: Type of the tensor.
            device: Device of the tensor.
        """
        if torch.is_inference_mode_enabled():
            # Tensors created in inference mode can never take part in a graph, so they are not kept.
            return torch.empty(count, dtype=dtype, device=device)
        kept = self._taken.setdefault((count, dtype, device), [])
        for tensor in kept:
            if _references(tensor) == _UNUSED:
                return tensor.detach()
        kept.append(torch.empty(count, dtype=dtype, device=device))
        return kept[-1].detach()

    def like(self, flat: Tensor) -> Tensor:
        """Take a tensor of the size, type and device of another."""
        return self.take(flat.numel(), flat.dtype, flat.device)

    # Updates.

    def apply(
        self, update: Callable[..., Any], changed: Sequence[Sequence[Tensor]],
        given: Sequence[Sequence[Tensor]], generator: torch.Generator | None = None, *,
        eta_in: int | None = None, **scalars: Any,
    ) -> list[Any] | None:  # fmt: skip
        """Apply a pure function to all entries, by its compiled loop or else block by block.

        The function takes flat tensors of one length and changes them in place: a tensor for each column of
        `changed` and of `given`, and standard normal numbers if its next parameter is called `eta`. Its
        keyword-only parameters are scalars. The random numbers are the same with and without the loop. Of
        DTensors, this process's parts are changed and read, with the random numbers of their rows.

        Args:
            update: The function.
            changed: The columns to change, each a list of tensors: the first of every list belong together,
                the second, and so on.
            given: The columns to read.
            generator: Source of random numbers; torch's global generator if None.
            eta_in: Index of a column of `changed` that is overwritten and whose memory holds `eta`, drawn
                tensor by tensor. If None, `eta` is drawn for all tensors at once, into a buffer.
            scalars: The scalars by name. A column may replace a number.

        Returns:
            The sums over all entries, for a function with sums: those of the loop, or the function's
            results summed over the blocks.
        """
        spans = None
        if type(changed[0][0]) not in (Tensor, nn.Parameter) and is_sharded(changed[0][0]):
            spans = [span(t) for t in changed[0]]
            changed, given = ([list(map(local, c)) for c in k] for k in (changed, given))
            scalars = {
                n: list(map(local, v)) if isinstance(v, list | tuple) else v
                for n, v in scalars.items()
            }
        sums = kernels.run(update, changed, given, generator, spans, **scalars)
        if sums is not None:
            return sums
        read = [*given]
        if _draws(update):
            if eta_in is None:
                sizes = [t.numel() for t in changed[0]]
                flat = self.get("noise", [sum(sizes)], changed[0][0])
                read.append(flat.split(sizes))
                if spans is None:
                    normals_([flat], generator)
                else:
                    slices_of_normals_(read[-1], spans, generator, together=True)
            elif spans is None:
                normals_(changed[eta_in], generator)
            else:
                slices_of_normals_(changed[eta_in], spans, generator)
        if spans is not None:  # a process may have no rows of a weight
            some = [i for i, t in enumerate(changed[0]) if t.numel()]
            if not some:
                return None
            changed = [[c[i] for i in some] for c in changed]
            read = [[c[i] for i in some] for c in read]
            scalars = {
                n: [v[i] for i in some] if isinstance(v, list | tuple) else v
                for n, v in scalars.items()
            }
        flats = len(changed) + len(read)
        columns = [name for name, value in scalars.items() if isinstance(value, list | tuple)]
        total: list[Any] | None = None
        for parts in blocks(changed, [*read, *(scalars[name] for name in columns)]):
            own = scalars | dict(zip(columns, parts[flats:], strict=True)) if columns else scalars
            eta = [] if eta_in is None else [parts[eta_in]]
            result = update(*parts[:flats], *eta, **own)
            if result is not None:
                total = result if total is None else list(map(torch.add, total, result))
        return total


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor with an entry that is not finite, or None; in one pass."""
    if not tensors:
        return None
    # A norm is finite only if every entry is; overflow of the norm itself is ruled out below.
    norms = list(torch._foreach_norm(list(tensors)))
    if len({(n.device, n.dtype) for n in norms}) > 1:
        norms = [n.to(norms[0].device, torch.float32) for n in norms]
    if math.isfinite(float(torch.stack(norms).sum())):
        return None
    odd = (i for i, tensor in enumerate(tensors) if not bool(torch.isfinite(tensor).all()))
    return next(odd, None)


def blocks(
    changed: Sequence[Sequence[Tensor]], given: Sequence[Sequence[Tensor]]
) -> Iterator[list[Tensor]]:
    """Iterate over lists of tensors of matching shapes, as flat tensors of one length at a time.

    Args:
        changed: Lists of tensors to change; in-place changes of a block apply to them.
        given: Lists of tensors to read.

    Yields:
        A flat tensor for each list, first those of `changed`.
    """
    first = changed[0][0]
    limit = BLOCK if first.device.type == "cpu" else _OTHER_BLOCK
    small: list[int] = []
    for i, tensor in enumerate(changed[0]):
        # Below half a block, copying costs less than the calls; a non-contiguous tensor must be copied.
        alone = len(changed[0]) == 1 or 2 * tensor.numel() >= limit
        if not (alone and all(c[i].is_contiguous() for c in changed)):
            small.append(i)
            continue
        flat = [c[i].view(-1) for c in changed] + [g[i].reshape(-1) for g in given]
        if tensor.numel() <= limit:
            yield flat
            continue
        for parts in zip(*(t.split(limit) for t in flat), strict=True):
            yield list(parts)
    for some in _packed(small, [t.numel() for t in changed[0]], limit):
        if len(some) == len(changed[0]):
            yield from _gathered(changed, given)
        else:
            yield from _gathered(*([[c[i] for i in some] for c in k] for k in (changed, given)))


def _gathered(
    changed: Sequence[Sequence[Tensor]], given: Sequence[Sequence[Tensor]]
) -> Iterator[list[Tensor]]:
    """Yield one block of small tensors."""
    there = [_neighbours(column) for column in [*changed, *given]]
    flats = [
        _flatten_dense_tensors(column) if whole is None else whole
        for column, whole in zip([*changed, *given], there, strict=True)
    ]
    yield flats
    for column, flat, whole in zip(changed, flats, there, strict=False):
        if whole is None:
            torch._foreach_copy_(list(column), _unflatten_dense_tensors(flat, column))


def _draws(update: Callable[..., Any]) -> bool:
    code = getattr(update, "__code__", None)  # functions and methods have it
    names = signature(update).parameters if code is None else code.co_varnames[: code.co_argcount]
    return "eta" in names


def _neighbours(column: Sequence[Tensor]) -> Tensor | None:
    """Return the flat tensor that adjacent tensors in one memory are parts of, or None."""
    first = column[0]
    start = place = first.data_ptr()
    for tensor in column:
        if tensor.data_ptr() != place or not tensor.is_contiguous():
            return None
        place += tensor.numel() * tensor.itemsize
    memory = first.untyped_storage()
    if place > memory.data_ptr() + memory.nbytes():
        return None  # adjacent by chance
    return first.as_strided(((place - start) // first.itemsize,), (1,))


def _packed(places: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield runs of tensors with at most `limit` entries in total, or of a single one."""
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
