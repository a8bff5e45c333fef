"""Which device a process computes on: one function decides it for `fit`, commands and process groups.

Under torchrun every process of a machine has a number, `LOCAL_RANK`, and takes that accelerator.
"""

from __future__ import annotations

import os
import socket

import torch

__all__ = ["identity", "process_device", "take_device"]


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
