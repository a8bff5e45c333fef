"""Weights that are shared out over processes: the parts of `torch.distributed.fsdp.fully_shard`'s DTensors.

A process holds some rows of every weight, a plain tensor in its own memory. Updates run on these, and a
state beside a weight is shared out as it is. Random numbers are those of the whole weight, of which each
process takes its own rows, so that a run does not depend on the number of processes.

Nothing here imports `torch.distributed`: a tensor that is a DTensor brings what is needed with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "all_groups",
    "check_alike",
    "is_sharded",
    "local",
    "part",
    "refuse_sharded",
    "reshard",
    "sharding_groups",
    "span",
    "whole",
    "wrapped",
]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):  # most are: this is asked at every step
        return False
    module = sys.modules.get("torch.distributed.tensor")  # without it there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, on the same memory; a plain tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    own: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return own


def wrapped(own: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the parts `own`, which are shared out as `like` is."""
    if not is_sharded(like):
        return own
    dtensor: Any = like
    result: Tensor = sys.modules["torch.distributed.tensor"].DTensor.from_local(
        own, dtensor.device_mesh, dtensor.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip
    return result


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, on the CPU; a plain tensor as it is. All processes must call it."""
    if not is_sharded(tensor):
        return tensor
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full.cpu()


def part(full: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a whole tensor that is to be shared out as `like` is, as a copy."""
    if not is_sharded(like):
        return full
    start, _ = span(like)
    own = local(like)
    return full.reshape(-1)[start : start + own.numel()].view(own.shape).to(own.device, copy=True)


def span(tensor: Tensor) -> tuple[int, int]:
    """Return where a process's part begins in the whole tensor, as a flat one, and the whole's entries."""
    if not is_sharded(tensor):
        return 0, tensor.numel()
    dtensor: Any = tensor
    for dim, placement in enumerate(dtensor.placements):
        if placement.is_shard():
            rows, processes = tensor.shape[0], dtensor.device_mesh.size(dim)
            first = min(rows, dtensor.device_mesh.get_local_rank(dim) * -(-rows // processes))
            return first * tensor.shape[1:].numel(), tensor.numel()
    return 0, tensor.numel()


def sharding_groups(tensor: Tensor) -> list[Any]:
    """Return the process groups over which the parts of a DTensor are spread."""
    dtensor: Any = tensor
    return [
        dtensor.device_mesh.get_group(dim)
        for dim, placement in enumerate(dtensor.placements)
        if placement.is_shard()
    ]


def all_groups(tensor: Tensor) -> list[Any]:
    """Return the process groups of every dimension of a DTensor's mesh."""
    dtensor: Any = tensor
    return [dtensor.device_mesh.get_group(dim) for dim in range(dtensor.device_mesh.ndim)]


def check_alike(weights: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` unless all weights are shared out by rows over one mesh, or none is shared out."""
    sharded = {name: p for name, p in weights.items() if is_sharded(p)}
    if not sharded:
        return
    plain = next((name for name in weights if name not in sharded), None)
    first: Any = next(iter(sharded.values()))
    if plain is not None:
        raise ValueError(
            f"weight {plain!r} is not sharded but {next(iter(sharded))!r} is: call fully_shard on the whole "
            "model, or leave the plain weights out of params"
        )
    for name, p in sharded.items():
        dtensor: Any = p
        kinds = [type(placement).__name__ for placement in dtensor.placements]
        split = [placement.dim for placement in dtensor.placements if placement.is_shard()]
        if set(kinds) - {"Shard", "Replicate"} or split not in ([], [0]):
            raise ValueError(
                f"weight {name!r} is placed as {tuple(dtensor.placements)}: expected rows shared out over "
                "one dimension of a mesh, as fully_shard does by itself"
            )
        if dtensor.device_mesh != first.device_mesh:
            raise ValueError(
                f"weight {name!r} is on another mesh than {next(iter(sharded))!r}: shard all weights of an "
                "optimiser over one mesh"
            )


def refuse_sharded(tensors: Iterable[Tensor], sentence: str) -> None:
    """Raise a `ValueError` with this sentence if one of the tensors is a DTensor."""
    if any(is_sharded(t) for t in tensors):
        raise ValueError(sentence)


def reshard(model: nn.Module) -> None:
    """Let the next forward pass gather the weights again, which have changed."""
    for module in model.modules():
        # FSDP2 keeps what it has gathered after a forward pass that no backward pass follows.
        if "torch.distributed.fsdp" in sys.modules and hasattr(module, "_get_fsdp_state"):
            module.reshard()  # type: ignore[operator]
