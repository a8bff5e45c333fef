"""Several processes under torchrun: the only place that imports `torch.distributed`.

Every function also works without a process group, as if there were one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "LostProcessError",
    "any_of",
    "average_gradients",
    "barrier",
    "broadcast",
    "gather",
    "in_group",
    "process_group",
    "rank",
    "refuse_averaging",
    "sum_packed",
    "world_size",
]


class LostProcessError(ConnectionError):
    """Another process of the run has died or does not respond."""


@contextmanager
def _talking() -> Iterator[None]:
    """Turn a back end's error about a lost process into one clear sentence."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            f"process {rank()} of {world_size()} has lost contact with another one, which has died or does "
            f"not answer ({str(error).splitlines()[0]}): see its own message, then start again with "
            "resume=True"
        ) from error


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that torchrun started, if it did; leave them when the block ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or dist.is_initialized():
        yield
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # A rank that dies must end the run soon, not after torch's half hour.
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    try:
        yield
    finally:
        dist.destroy_process_group()


in_group = dist.is_initialized
"""Whether there is a process group: torch's own function, for what asks at every step."""


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def refuse_averaging(module: nn.Module, _args: Any) -> None:
    """Raise a `RuntimeError` if `DistributedDataParallel` calls the module: a forward pre-hook.

    It averages gradients over processes whose weights differ, because each has draws or noise of its own.
    """
    active = DistributedDataParallel._active_ddp_module
    if world_size() > 1 and (active is not None or isinstance(module, DistributedDataParallel)):
        raise RuntimeError(
            f"DistributedDataParallel averages the gradients of {type(module).__name__} over processes whose "
            "weights differ, because each draws its own noise: call the plain module; VOGN, IVON and Noisy "
            "K-FAC average over processes themselves, and samplers run one chain per process, or one for all "
            "if each gets a generator with the same seed"
        )


def barrier() -> None:
    """Wait for all processes."""
    if dist.is_initialized():
        with _talking():
            dist.barrier()


def broadcast(tensors: Sequence[Tensor], source: int = 0) -> None:
    """Overwrite `tensors` with those of process `source`."""
    if dist.is_initialized():
        with _talking():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), source)


def gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all processes, which must have the same shape, in order of rank."""
    if not dist.is_initialized():
        return [tensor]
    result = [torch.empty_like(tensor) for _ in range(world_size())]
    with _talking():
        dist.all_gather(result, tensor.contiguous())
    return result


def any_of(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether any process sets it, in one message."""
    if not dist.is_initialized():
        return list(flags)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    counts = torch.tensor([float(flag) for flag in flags], device=device)
    with _talking():
        dist.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]


def average_gradients(parameters: Sequence[Tensor], share: float) -> None:
    """Replace every gradient by its average over processes, in one message.

    Args:
        parameters: The parameters, in the same order everywhere.
        share: Fraction of the whole batch that this process has seen; the shares sum to 1.
    """
    if not dist.is_initialized() or not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    packed = torch.cat([g.reshape(-1).float() for g in gradients]).mul_(share)
    with _talking():
        dist.all_reduce(packed)
    for gradient, part in zip(gradients, packed.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


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
        dist.all_reduce(packed)
    for tensor, part in zip(tensors, packed.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
