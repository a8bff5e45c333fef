"""Which device a process computes on: one function decides it for `fit`, commands and process groups.

Under torchrun every process of a machine has a number, `LOCAL_RANK`, and takes that accelerator.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = [
    "PINNED",
    "device_random_state",
    "forked_random_numbers",
    "generator_state",
    "identity",
    "process_device",
    "set_device_random_state",
    "take_device",
]

PINNED = {"cuda", "xpu"}
"""Kinds of devices that copy from and to pinned memory while Python goes on."""

# One thread at a time in `_no_collection`; a child process must not be forked from the middle of it.
_one_at_a_time = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_one_at_a_time.acquire,
        after_in_parent=_one_at_a_time.release,
        after_in_child=_one_at_a_time.release,
    )


def process_device(
    given: str | torch.device | None = None, own: torch.device | None = None
) -> torch.device:
    """Return the device of this process.

    Args:
        given: What the user asks for. A kind of device, such as `"cuda"`, is this process's own one of that
            kind; one with a number is that one.
        own: Where the network is, to stay there if nothing is given; None for the machine's accelerator, if
            it has one. On the first accelerator, where torch puts what is moved to `"cuda"`, other processes
            than the first do not stay.

    Raises:
        ValueError: If there is no such device, or none for this process.

    Example:
        >>> process_device("cpu")
        device(type='cpu')
    """
    rank = _local_rank()
    if given is not None:
        device = _parsed(given)
    elif own is not None:
        device = torch.device(own.type) if own.index == 0 and rank else own
    else:
        device = _accelerator() or torch.device("cpu")
    if device.index is None and _is_accelerator(device):
        device = torch.device(device.type, _number(device.type, rank))
    if given is not None:
        _try(device)
    return device


def _number(kind: str, rank: int | None) -> int:
    """Return the number of this process's accelerator."""
    if rank is None:
        return torch.accelerator.current_device_index()
    count = torch.accelerator.device_count()
    if rank >= count > 1:
        raise ValueError(
            f"process {rank} of this machine has no {kind} device of its own, because there are {count}: "
            f"start at most {count} processes a machine, as in torchrun --nproc-per-node {count}"
        )
    # Where a launcher shows every process only the device that is meant for it, that one has number 0.
    return rank if count > 1 else 0


def take_device(given: str | torch.device | None = None) -> torch.device:
    """Return the device of this process after making it the one that `"cuda"` without a number means.

    A process group must not exist yet: NCCL refuses two processes on one device.
    """
    device = process_device(given)
    if device.index is not None and _is_accelerator(device):
        torch.accelerator.set_device_index(device.index)
    return device


def device_random_state(device: torch.device) -> Tensor:
    """Return the state of the global random numbers of a device, such as those of its dropout layers.

    Example:
        >>> bool((device_random_state(torch.device("cpu")) == torch.get_rng_state()).all())
        True
    """
    if device.type == "cpu":
        return generator_state(torch.default_generator)
    with _no_collection():
        state: Tensor = torch.get_device_module(device).get_rng_state(*_argument(device))
        return state


def generator_state(generator: torch.Generator) -> Tensor:
    """Return the state of a generator, which several threads may use.

    Example:
        >>> generator = torch.Generator()
        >>> bool((generator_state(generator) == generator.get_state()).all())
        True
    """
    with _no_collection():
        return generator.get_state()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage.

    torch reads a state under a lock of the generator and makes a Python object there. If that starts a
    garbage collection, another thread may run. If it reads, sets or seeds the generator, both wait for ever.
    """
    with _one_at_a_time:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def set_device_random_state(device: torch.device, state: Tensor) -> None:
    """Let the global random numbers of a device continue from a state."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_argument(device))


def _argument(device: torch.device) -> list[torch.device]:
    return [] if device.type == "mps" else [device]  # of those there is one only


@contextmanager
def forked_random_numbers() -> Iterator[None]:
    """Restore torch's global random numbers after the block: those of the CPU and of all accelerators.

    `torch.random.fork_rng` does so too, but warns where there are several accelerators.
    """
    kind, places = _accelerator(), [torch.device("cpu")]
    if kind is not None:
        count = torch.accelerator.device_count()
        places += [torch.device(kind.type, number) for number in range(count)]
    states = [device_random_state(place) for place in places]
    try:
        yield
    finally:
        for place, state in zip(places, states, strict=True):
            set_device_random_state(place, state)


def identity(device: torch.device) -> str:
    """Return a name that two processes have in common only if they compute on the same accelerator."""
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
        return str(properties.uuid)
    except (AttributeError, RuntimeError, AssertionError):
        return f"{socket.gethostname()} {device}"


def _parsed(given: str | torch.device) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise _unusable(given, error) from error


def _try(device: torch.device) -> None:
    """Raise a `ValueError` if there is no such device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise _unusable(device, error) from error


def _unusable(device: str | torch.device, error: Exception) -> ValueError:
    why = str(error).splitlines()[0]
    return ValueError(
        f"device is {str(device)!r}, which this torch cannot use ({why}): leave it out, or choose another "
        "one, such as cpu"
    )


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _is_accelerator(device: torch.device) -> bool:
    found = _accelerator()
    return found is not None and found.type == device.type


def _local_rank() -> int | None:
    """Return this process's number among those that torchrun has started on this machine, if it has."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    return int(os.environ.get("LOCAL_RANK", "0"))
