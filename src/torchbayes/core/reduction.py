"""Sums over processes of what a step needs of each weight, through memory that is kept.

New memory for every step costs more than sending it: on the build machine 88 ms of processor time for the
19 MB of a network with 2.4 million weights, of which gloo needs 15 and a copy 2. So tensors are written into
their places in a few flat buffers, and read there by the update.

Processes of one machine have their buffers in memory that all of them see: each sums up its share of the
entries, and reads the others' sums. Otherwise the buffers are sent, a bucket of about a megabyte at a time,
and torch.distributed sums them up on the way. The sums are the same bits in every process, and from run to
run.

Messages can leave while the backward pass goes on, where a caller knows that it is the last one of its step
and that nothing changes a gradient after it. `fit` does; in a loop of somebody's own `.grad` may change in
ways that do not show. Hooks then show each tensor when the pass has finished with it (`early`), and a
bucket leaves as soon as all of its tensors are there. Buckets leave in one order, on connections of their
own, so that it makes no difference when each process sends them. A process that has no use for a weight, or
no examples, sends zeros at the end. If the pass itself goes on to change what has been sent, as it does when
it recomputes activations of a layer that is used twice, or brings a tensor that the last step did not have,
all processes send again, and that process sends after the backward pass from then on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from torchbayes.core import distributed
from torchbayes.core.shared_memory import shared_bytes

__all__ = ["BUCKET", "Reduction", "average_gradients", "sent_early"]

BUCKET = 1 << 20
"""Bytes in a message, unless a single tensor has more."""

_LOG = logging.getLogger("torchbayes")
_VARIABLE = "TORCHBAYES_MESSAGES"
_TYPES = {"": None, "float32": None, "bfloat16": torch.bfloat16}

# A sum of more rounds away much of what is added last, and all of it where that is a 256th of the sum.
_MOST_BFLOAT16 = 64

# Entries that are summed up at a time, and so stay in the processor's cache; bytes between buffers.
_BLOCK, _ALIGNED = 1 << 16, 64

K = TypeVar("K", bound=Hashable)
Form = tuple[torch.Size, torch.dtype, torch.device]


@dataclass
class Buffer:
    """One flat tensor for all tensors of a type and device, and where in it each bucket ends."""

    dtype: torch.dtype
    device: torch.device
    count: int
    ends: list[int]

    @property
    def size(self) -> int:
        """Bytes, up to where the next buffer may begin."""
        return -(-self.count * self.dtype.itemsize // _ALIGNED) * _ALIGNED


@dataclass
class Bucket(Generic[K]):
    """A part of a buffer that is sent as one message.

    Attributes:
        own: This process's part of the sums, and later the sums.
        wire: What is sent in its place, if that has another type.
        keys: Whose tensors it has.
        last: The place of the last of them among all keys.
    """

    own: Tensor
    wire: Tensor | None = None
    keys: list[K] = field(default_factory=list)
    last: int = 0

    def start(self, lane: distributed.Lane | None) -> Callable[[], None]:
        """Begin to sum it up; return what waits for the sums."""
        if self.wire is None:
            return distributed.start_sum(self.own, lane)
        own, wire = self.own, self.wire
        wait = distributed.start_sum(wire.copy_(own), lane)

        def received() -> None:
            wait()
            own.copy_(wire)

        return received


class Reduction(Generic[K]):
    """Sums over processes of tensors that are known by keys.

    Every process begins with the same keys, puts what it has, and finishes. A key that a process has not put
    counts as zeros. A copy or pickle is empty.

    Example:
        >>> import torch
        >>> weight = torch.zeros(2)
        >>> reduction = Reduction()
        >>> reduction.begin({"gradient": weight, "square": weight})   # alone, without a process group
        >>> reduction.put("gradient", torch.tensor([1.0, 2.0]), 3.0)
        >>> reduction.finish(3.0)
        (3.0, {'gradient': tensor([1., 2.])})
    """

    def __init__(self) -> None:
        self._like: dict[K, Tensor] = {}
        self._forms: dict[K, Form] = {}
        self._done: Callable[[], None] | None = None
        self._all: list[list[Tensor]] | None = None
        self._buckets: list[Bucket[K]] = []
        self._views: dict[K, Tensor] = {}
        self._held: dict[K, Tensor] = {}
        self._group: object = None
        self._lane: distributed.Lane | None = None
        self._bucket_of: dict[K, int] = {}
        self._reset()

    def __reduce__(self) -> tuple[type[Reduction[K]], tuple[()]]:
        return Reduction, ()

    def _reset(self) -> None:
        """Forget what steps were like."""
        self._trusted = True
        self._due: list[set[K]] = []  # what the last step has put in each bucket, if there was one
        self._clear()

    def _clear(self) -> None:
        """Start a step."""
        self._puts: dict[K, tuple[Tensor, float]] = {}
        self._written: dict[K, tuple[Tensor, int, float]] = {}  # before `put`
        self._holding: set[K] = set()
        self._waits: list[Callable[[], None]] = []
        self._changed = False
        self._left = [set(keys) for keys in self._due]
        self._sent = 0  # buckets that have left before `finish`

    def begin(self, like: Mapping[K, Tensor], *, apart: bool = False) -> None:
        """Start sums, or go on with those of which some parts were shown before.

        Args:
            like: A tensor of the right shape, type and device for every key, in the same order everywhere:
                the order in which messages are to leave.
            apart: Whether parts may be shown early. The messages then have connections of their own, which
                one `Reduction` at a time can have: the one that was last arranged.
        """
        group, old = distributed.this_group(), self._like
        if self._done is not None and group == self._group:
            self._done()  # all have read the last sums
        self._done = None
        self._holding.clear()  # a step that has come to no end may have held something
        if (
            group != self._group
            or list(old) != list(like)
            or any(self._forms[key] != _form(t) for key, t in like.items())
        ):
            self._like = {}  # until all is arranged: an error leaves nothing to go on with
            self._arrange(like, apart)
            self._group = group

    def _arrange(self, like: Mapping[K, Tensor], apart: bool) -> None:
        buffers: dict[tuple[torch.dtype, torch.device], Buffer] = {}
        places: dict[K, tuple[Buffer, int, int]] = {}
        for key, tensor in like.items():
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            kind = (dtype, tensor.device)
            buffer = buffers.setdefault(kind, Buffer(dtype, tensor.device, 0, []))
            begun = buffer.ends[-1] if buffer.ends else 0
            new = tensor.numel()
            if buffer.count > begun and (buffer.count - begun + new) * dtype.itemsize > BUCKET:
                buffer.ends.append(buffer.count)
            places[key] = buffer, buffer.count, len(buffer.ends)
            buffer.count += new
        kept = list(buffers.values())
        for buffer in kept:
            buffer.ends.append(buffer.count)
        self._all = self._shared(kept)
        self._rank = distributed.rank() if self._all is not None else 0
        self._own = (
            [torch.empty(b.count, dtype=b.dtype, device=b.device) for b in kept]
            if self._all is None
            else self._all[self._rank]
        )
        which = {id(buffer): i for i, buffer in enumerate(kept)}
        self._views = {
            key: self._own[which[id(buffer)]][start : start + like[key].numel()].view(
                like[key].shape
            )
            for key, (buffer, start, _) in places.items()
        }
        self._held = {}
        self._buckets, self._bucket_of = [], {}
        if self._all is None:
            self._divide(kept, {key: (which[id(b)], part) for key, (b, _, part) in places.items()})
        self._reset()
        # Autograd has a thread for each accelerator, and this is for one.
        apart = apart and self._all is None and len({b.device for b in kept}) == 1
        self._lane = distributed.take_lane(self) if apart else None
        self._like = dict(like)  # keeps them, so that a key with an id stays that tensor's
        # A parameter that `model.to(...)` has converted is the same object.
        self._forms = {key: _form(tensor) for key, tensor in like.items()}

    def _divide(self, buffers: Sequence[Buffer], places: Mapping[K, tuple[int, int]]) -> None:
        """Divide the buffers into messages, in the order in which they can be complete."""
        wire = _message_type()
        found: dict[tuple[int, int], Bucket[K]] = {}
        for which, (flat, buffer) in enumerate(zip(self._own, buffers, strict=True)):
            other = None if wire in (None, flat.dtype) else torch.empty_like(flat, dtype=wire)
            for part, (start, end) in enumerate(zip([0, *buffer.ends], buffer.ends, strict=False)):
                sent = None if other is None else other[start:end]
                found[which, part] = Bucket(flat[start:end], sent)
        for number, (key, place) in enumerate(places.items()):
            found[place].keys.append(key)
            found[place].last = number
        self._buckets = sorted(found.values(), key=lambda bucket: bucket.last)
        self._bucket_of = {k: i for i, bucket in enumerate(self._buckets) for k in bucket.keys}

    @staticmethod
    def _shared(buffers: Sequence[Buffer]) -> list[list[Tensor]] | None:
        """Return the buffers of every process, if they can share memory."""
        if distributed.world_size() == 1 or any(b.device.type != "cpu" for b in buffers):
            return None
        memory = shared_bytes(sum(buffer.size for buffer in buffers))
        if memory is None:
            return None
        found: list[list[Tensor]] = []
        for one in memory:
            start, own = 0, []
            for b in buffers:
                own.append(one[start : start + b.count * b.dtype.itemsize].view(b.dtype))
                start += b.size
            found.append(own)
        return found

    # A step.

    @property
    def watches(self) -> bool:
        """Whether it is of use to show tensors to `early`."""
        return self._trusted and bool(self._due) and self._own_lane is not None

    @property
    def _own_lane(self) -> distributed.Lane | None:
        """Return the connections that are this object's alone, unless another one has taken them."""
        lane = self._lane
        if lane is None or lane.holder() is not self or self._group != distributed.this_group():
            return None
        return lane

    def early(self, key: K, tensor: Tensor, factor: float = 1.0) -> None:
        """Show what `put` will bring; it may be sent at once.

        Args:
            key: The key.
            tensor: The tensor, the same object as for `put`.
            factor: The factor to multiply it by.
        """
        if key not in self._views or not self.watches:
            return
        place = self._bucket_of[key]
        if place < self._sent:
            return  # `put` finds it changed
        self._write(key, tensor, factor)
        self._written[key] = tensor, tensor._version, factor
        self._left[place].discard(key)
        while self._sent < len(self._buckets) and not self._left[self._sent]:
            self._send_next()

    def _send_next(self) -> None:
        """Send a bucket whose tensors are there; those that were not put in the last step are not awaited."""
        lane = self._own_lane
        assert lane is not None
        lane.open = True
        bucket = self._buckets[self._sent]
        for key in bucket.keys:
            if key not in self._written:
                self._views[key].zero_()
        self._waits.append(bucket.start(lane))
        self._sent += 1

    def hold(self, key: K, tensor: Tensor, factor: float = 1.0) -> None:
        """Add a tensor times a factor to what a last `put` will bring."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = torch.empty_like(self._views[key])
        if key not in self._holding:
            self._holding.add(key)
            held.zero_()
        held.add_(tensor, alpha=factor)

    def put(self, key: K, tensor: Tensor, factor: float = 1.0) -> None:
        """Set this process's part of a sum to a tensor times a factor, and what was held for it."""
        self._puts[key] = tensor, factor
        if _same(self._written.get(key), (tensor, tensor._version, factor)):
            return
        if self._bucket_of.get(key, 0) < self._sent:
            self._changed = True
        else:
            self._write(key, tensor, factor)

    def _write(self, key: K, tensor: Tensor, factor: float) -> None:
        view = self._views[key]
        if view.dtype == tensor.dtype:
            torch.mul(tensor, factor, out=view)
        else:
            view.copy_(tensor).mul_(factor)
        if key in self._holding:
            view.add_(self._held[key])

    def finish(self, weight: float | None = None) -> tuple[float, dict[K, Tensor]]:
        """Sum up over processes.

        Args:
            weight: This process's part of a number to divide by, which is at least 1; if None, sums are not
                divided.

        Returns:
            The sum of the weights, and the sums of those tensors that any process has put, in memory that
            is theirs until the next `begin`.
        """
        for key in self._holding - self._puts.keys():
            self._holding.discard(key)
            self.put(key, self._held[key])
        for key, view in self._views.items():
            if key not in self._puts:
                if self._bucket_of.get(key, 0) >= self._sent:
                    view.zero_()
                elif key in self._written:
                    self._changed = True
        for bucket in self._buckets[self._sent :]:
            self._waits.append(bucket.start(self._own_lane))
        there = [float(key in self._puts) for key in self._like]
        total, changed, *used = distributed.total([weight or 0.0, float(self._changed), *there])
        share = 1.0 if weight is None else 1 / max(total, 1.0)
        if self._all is None:
            self._receive(changed > 0, share)
        else:
            self._sum_up(self._all, share)
        self._end_step()
        sums = {
            key: view if view.dtype == t.dtype else view.to(t.dtype)
            for (key, t), view, n in zip(
                self._like.items(), self._views.values(), used, strict=True
            )
            if n > 0
        }
        return total, sums

    def _receive(self, again: bool, share: float) -> None:
        """Wait for the sums.

        Args:
            again: Whether what any process has sent has changed since, so that all send again.
            share: What to multiply the sums by.
        """
        for wait in self._waits:
            wait()
        if again:
            self._trusted = self._trusted and not self._changed
            for key, view in self._views.items():
                if key in self._puts:
                    self._write(key, *self._puts[key])
                else:
                    view.zero_()
            for wait in [bucket.start(self._own_lane) for bucket in self._buckets]:
                wait()
        if share != 1.0:
            for flat in self._own:
                flat.mul_(share)

    def _end_step(self) -> None:
        """Remember what this step was like."""
        if self._puts:
            self._due = [self._puts.keys() & set(bucket.keys) for bucket in self._buckets]
        lane = self._own_lane
        if lane is not None:
            lane.open = False
        self._clear()

    def _sum_up(self, everyone: Sequence[Sequence[Tensor]], share: float) -> None:
        """Sum up this process's share of the entries, and fetch the others'; all have put theirs."""
        count, rank = len(everyone), self._rank
        for flats in zip(*everyone, strict=True):
            parts = [flat.tensor_split(count)[rank] for flat in flats]
            for own, *others in zip(*(p.split(_BLOCK) for p in (parts[rank], *parts)), strict=True):
                others.pop(rank)
                for other in others:
                    own.add_(other)
                if share != 1.0:
                    own.mul_(share)
        distributed.total([0.0])
        for flats in zip(*everyone, strict=True):
            mine = flats[rank].tensor_split(count)
            for other, flat in enumerate(flats):
                if other != rank:
                    mine[other].copy_(flat.tensor_split(count)[other])
        # Until all have fetched it, this memory must not be written.
        self._done = distributed.start_sum(torch.zeros(1))


def _form(tensor: Tensor) -> Form:
    return tensor.shape, tensor.dtype, tensor.device


def _same(one: tuple[Tensor, int, float] | None, other: tuple[Tensor, int, float] | None) -> bool:
    """Whether a tensor, its version and its factor are those of another time; tensors have no ==."""
    return one is not None and other is not None and one[0] is other[0] and one[1:] == other[1:]


def _message_type() -> torch.dtype | None:
    """Return the type in which all processes send sums; None for that of the sums themselves."""
    given = os.environ.get(_VARIABLE, "")
    if given not in _TYPES:
        raise ValueError(f"{_VARIABLE} is {given!r}: expected float32 or bfloat16")
    chosen = _TYPES[given]
    if not distributed.alike(str(chosen).encode()):
        raise ValueError(
            f"{_VARIABLE} is {given!r} here and something else in another process: set it alike for all"
        )
    if chosen is torch.bfloat16:
        world = distributed.world_size()
        if world > _MOST_BFLOAT16:
            raise ValueError(
                f"{_VARIABLE} is {given!r} and there are {world} processes, of whose sums that would lose a "
                f"part: expected at most {_MOST_BFLOAT16} processes, or float32"
            )
        _LOG.info("sums over processes are sent in bfloat16 (%s)", _VARIABLE)
    return chosen


@contextmanager
def sent_early(
    reduction: Reduction[int], parameters: Sequence[Tensor], share: float
) -> Iterator[None]:
    """Send gradients while the backward pass inside the block goes on: nothing may change them after it.

    Args:
        reduction: Sums that are kept from step to step.
        parameters: The parameters whose gradients `average_gradients` will take.
        share: As there.
    """
    if not reduction.watches:
        yield
        return

    def arrived(parameter: Tensor) -> None:
        if parameter.grad is not None:
            with torch.no_grad():
                reduction.early(id(parameter), parameter.grad, share)

    handles = [
        p.register_post_accumulate_grad_hook(arrived)
        for p in parameters
        if p.requires_grad and p.is_leaf
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def average_gradients(
    reduction: Reduction[int], parameters: Sequence[Tensor], share: float, *, apart: bool = False
) -> None:
    """Replace every gradient by its average over processes.

    Args:
        reduction: Sums that are kept from step to step.
        parameters: The parameters, in the same order everywhere.
        share: Fraction of the whole batch that this process has seen; the shares sum to 1.
        apart: Whether gradients are shown to `sent_early`.
    """
    if not distributed.in_group() or not parameters:
        return
    # Backward: the order in which gradients arrive.
    reduction.begin({id(p): p for p in reversed(parameters)}, apart=apart)
    for p in parameters:
        if p.grad is not None:
            reduction.put(id(p), p.grad, share)
    _, means = reduction.finish()
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if id(p) in means:
            p.grad.copy_(means[id(p)])
