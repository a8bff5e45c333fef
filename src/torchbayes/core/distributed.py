"""Several processes under torchrun: the only place that imports `torch.distributed`.

Every function also works without a process group, as if there were one process.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from torchbayes.core.device import identity, take_device
from torchbayes.core.heartbeat import Heartbeat

__all__ = [
    "Lane",
    "LostProcessError",
    "alike",
    "any_of",
    "back_ends",
    "barrier",
    "broadcast",
    "gather",
    "in_group",
    "of_first",
    "process_group",
    "rank",
    "refuse_shared",
    "standing_in",
    "stands_in",
    "start_sum",
    "sum_packed",
    "take_lane",
    "this_group",
    "total",
    "world_size",
]


_LOG = logging.getLogger("torchbayes")
_VARIABLE, _LIMIT = "TORCHBAYES_PROCESS_TIMEOUT", 120.0
_JOINING = timedelta(minutes=5)
_NOTICE = timedelta(seconds=10)
_heartbeat: Heartbeat | None = None
_meetings = 0
_place: tuple[int, int] | None = None


class LostProcessError(ConnectionError):
    """Another process of the run has died or does not respond."""


@contextmanager
def _talking() -> Iterator[None]:
    """Turn a back end's error about a lost process into one clear sentence."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, LostProcessError):
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if _heartbeat is not None:
            why = _reason(_heartbeat, why)
        raise LostProcessError(
            f"process {rank()} of {world_size()} has lost contact with another one, which has died or does "
            f"not answer ({why.rstrip('. ')}): see its own message, then start again with --resume"
        ) from error


def _reason(heartbeat: Heartbeat, told: str) -> str:
    """Say what has become of the other process, which knows better than a socket."""
    # An operation that timed out closes the connection, which is what those begun after it report.
    if "timed out" in told.lower() or "timeout" in told.lower():
        return f"no answer for {heartbeat.limit:g} s"
    with suppress(RuntimeError):  # the store may have gone too
        for _ in range(20):  # a process that ends needs a moment to be gone
            why = heartbeat.lost()
            if why is not None:
                return why
            time.sleep(0.05)
    return told


def _limit() -> float:
    """Return how many seconds a process may be silent."""
    given = os.environ.get(_VARIABLE, "")
    try:
        seconds = float(given) if given else _LIMIT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{_VARIABLE} is {given!r}: expected a number of seconds above 0")
    return seconds


def back_ends(device: torch.device) -> str:
    """Return the communication back ends for tensors of the CPU, and of the device if it is another one.

    Example:
        >>> back_ends(torch.device("cpu")), back_ends(torch.device("cuda", 1))
        ('cpu:gloo', 'cpu:gloo,cuda:nccl')
    """
    if device.type == "cpu":
        return "cpu:gloo"
    known = dist.Backend.default_device_backend_map
    if device.type not in known:
        raise ValueError(
            f"torch.distributed has no back end for {device.type} devices: train in one process, or pass "
            'device="cpu"'
        )
    return f"cpu:gloo,{device.type}:{known[device.type]}"


def _joined(limit: float, device: torch.device) -> Heartbeat:
    """Meet the processes that torchrun has started at its store."""
    global _meetings
    found: Iterator[tuple[Any, int, int]] = rendezvous("env://", timeout=_JOINING)
    store, own, world = next(found)
    _meetings += 1
    common = PrefixStore(f"torchbayes/{_meetings}", store)
    common.set(f"here/{own}", "1")
    try:
        common.wait([f"here/{other}" for other in range(world)], _JOINING)
    except RuntimeError as error:
        missing = [other for other in range(world) if not common.check([f"here/{other}"])]
        raise LostProcessError(
            f"process {own} of {world} has waited {_JOINING.seconds} s for processes "
            f"{', '.join(map(str, missing))}, which did not start: see their messages, then start again"
        ) from error
    group = PrefixStore(f"group/{_meetings}", store)
    # A process that waits for another one in a step, longer than this, gives it up.
    dist.init_process_group(
        back_ends(device), store=group, rank=own, world_size=world, timeout=timedelta(seconds=limit),
    )  # fmt: skip
    return Heartbeat(common, own, world, limit)


@contextmanager
def process_group(device: str | torch.device | None = None) -> Iterator[None]:
    """Join the processes that torchrun started, if it did; leave them when the block ends.

    A process that dies or ends with an error ends the others at once, one that hangs after
    `TORCHBAYES_PROCESS_TIMEOUT` seconds (120).

    Args:
        device: The `device` of `fit`. Every process takes an accelerator of its own, unless it is the CPU.
    """
    global _heartbeat, _lane
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or dist.is_initialized():
        yield
        return
    taken = take_device(device)
    with _talking():
        _heartbeat = _joined(_limit(), taken)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _heartbeat.end(error)
        _heartbeat = None
        if _lane is not None:  # whoever holds it must not keep connections open
            _lane.world = _lane.group = None
            _lane = None
        dist.destroy_process_group()


def refuse_shared(device: torch.device) -> None:
    """Raise a `ValueError` in all processes if two of them compute on the same accelerator.

    Args:
        device: That of this process.
    """
    if not _together() or device.type == "cpu":
        return
    taken = _digests(identity(device).encode())
    for process, one in enumerate(taken):
        if one in taken[:process]:
            raise ValueError(
                f"processes {taken.index(one)} and {process} compute on the same accelerator: pass "
                f"device={device.type!r}, so that each takes its own, and start no more of them than a "
                "machine has devices"
            )


def alike(value: bytes, group: Any = None) -> bool:
    """Whether all processes, or those of a group of them, give the same value."""
    return not _together() or len(set(_digests(value, group))) == 1


def _digests(value: bytes, group: Any = None) -> list[int]:
    """Return a number of 64 bits for the value that each process gives."""
    digest = int.from_bytes(hashlib.sha256(value).digest()[:8], "big", signed=True)
    return [int(one) for one in gather(torch.tensor(digest, device=_sender(group)), group)]


def of_first(value: int, groups: Sequence[Any]) -> int:
    """Return the number that the first process gives, in all processes of a mesh.

    Args:
        value: The number.
        groups: The groups of this process, one for each dimension of the mesh.
    """
    for group in groups:
        value = int(gather(torch.tensor(value, device=_sender(group)), group)[0])
    return value


def total(values: Sequence[float], groups: Sequence[Any] = (None,)) -> list[float]:
    """Return sums of numbers over all processes of a mesh, in one message for each of its dimensions.

    Args:
        values: The numbers, as many in every process.
        groups: The groups of this process, one for each dimension of the mesh; if left out, all processes.
    """
    if not _together():
        return list(values)
    kind = _sender(groups[0]) if groups else "cpu"
    # An accelerator may have no float64.
    dtype = torch.float64 if kind in ("cpu", "cuda") else torch.float32
    sums = torch.tensor(values, dtype=dtype, device=kind)
    for group in groups:
        with _talking():
            _finish(dist.all_reduce(sums, group=group, async_op=True), sums)
    result: list[float] = sums.tolist()
    return result


def _sender(group: Any = None) -> str:
    """Return the kind of device whose tensors the group sends without waiting for an accelerator."""
    # A group that the user has made may have a back end for one kind only.
    kinds = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]


def _finish(work: Any, tensor: Tensor) -> None:
    """Wait for an operation on a tensor; say so if it takes long."""
    if _heartbeat is None or tensor.device.type != "cpu":
        work.wait()
        return
    try:
        work.wait(_NOTICE)
        return
    except RuntimeError:
        if work.is_completed():
            raise
    silent = _heartbeat.longest_silence()
    _LOG.warning(
        "process %d waits for process %s; after %.0f s it gives up",
        rank(), "another" if silent is None else silent[0], _heartbeat.limit,
    )  # fmt: skip
    work.wait()


in_group = dist.is_initialized
"""Whether there is a process group: torch's own function, for what asks at every step."""


def this_group() -> object:
    """Return what is equal as long as the process group is the same; it does not keep the group alive."""
    return weakref.ref(dist.group.WORLD) if dist.is_initialized() else None


def rank() -> int:
    """Return the number of this process, from 0, or of the one that it stands in for."""
    if _place is not None:
        return _place[0]
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, or of those that began the run of the one that it stands in for."""
    if _place is not None:
        return _place[1]
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def standing_in(place: int, among: int) -> Iterator[None]:
    """Do the work of a process that is not there, alone: nothing is exchanged inside the block.

    Args:
        place: Number of that process.
        among: How many there were.
    """
    global _place
    before, _place = _place, (place, among)
    try:
        yield
    finally:
        _place = before


def stands_in() -> bool:
    """Whether this process does the work of another one."""
    return _place is not None


def _together() -> bool:
    return _place is None and dist.is_initialized()


def barrier() -> None:
    """Wait for all processes, as long as they live."""
    if _together():
        with _talking():
            if _heartbeat is None:
                dist.barrier()
            else:
                _heartbeat.meet()


def broadcast(tensors: Sequence[Tensor], source: int = 0) -> None:
    """Overwrite `tensors` with those of process `source`."""
    if _together():
        with _talking():
            for tensor in tensors:
                _finish(dist.broadcast(tensor.detach(), source, async_op=True), tensor)


def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensors of all processes, which must have the same shape, in order of rank.

    Args:
        tensor: That of this process.
        group: Some of the processes only.
    """
    if not _together():
        return [tensor]
    result = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with _talking():
        _finish(dist.all_gather(result, tensor.contiguous(), group=group, async_op=True), tensor)
    return result


def any_of(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether any process sets it, in one message."""
    if not _together():
        return list(flags)
    counts = torch.tensor([float(flag) for flag in flags], device=_sender())
    with _talking():
        _finish(dist.all_reduce(counts, async_op=True), counts)
    return [count > 0 for count in counts.tolist()]


@dataclass
class Lane:
    """Connections beside those of all other messages, for messages that processes send at different times.

    On one connection messages must begin in the same order everywhere. One that is sent during the backward
    pass, and in another process only after it, would meet another message there.

    Attributes:
        world: The process group that they are beside.
        group: The connections.
        holder: Returns whose messages they are for.
        open: Whether some messages have left of those that belong to one step.
    """

    world: Any
    group: Any
    holder: Callable[[], Any]
    open: bool = False


_lane: Lane | None = None


def take_lane(holder: Any) -> Lane | None:
    """Return connections for the messages of one object, which takes them from the one that had them.

    To be called by all processes. If some messages are still under way, these are new connections.
    """
    global _lane
    if not _together():
        return None
    world, found = dist.group.WORLD, _lane
    if any_of([found is None or found.world is not world or found.open])[0]:
        limit = None if _heartbeat is None else timedelta(seconds=_heartbeat.limit)
        with _talking():
            found = Lane(world, dist.new_group(timeout=limit), weakref.ref(holder))
    assert found is not None
    found.holder = weakref.ref(holder)
    _lane = found
    return found


def start_sum(tensor: Tensor, lane: Lane | None = None) -> Callable[[], None]:
    """Begin to replace a tensor by its sum over processes; return what waits until it is.

    Args:
        tensor: The tensor, of the same shape and type in all processes.
        lane: The connections to use, if they are others than usual.
    """
    if not _together():
        return lambda: None
    with _talking():
        work = dist.all_reduce(tensor, group=None if lane is None else lane.group, async_op=True)

    def wait() -> None:
        with _talking():
            _finish(work, tensor)

    return wait


def sum_packed(tensors: Sequence[Tensor]) -> None:
    """Replace every tensor by its sum over processes, in one message.

    Args:
        tensors: The tensors, in the same order and shapes everywhere.
    """
    if not dist.is_initialized():
        return
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    packed = torch.cat([t.reshape(-1).to(dtype) for t in tensors])
    with _talking():
        _finish(dist.all_reduce(packed, async_op=True), packed)
    for tensor, part in zip(tensors, packed.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
