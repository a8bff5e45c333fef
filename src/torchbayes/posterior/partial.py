"""What a posterior holds of a network that is trained in part, and how it knows the rest again.

A posterior holds the weights that were trained and the buffers that change with them. Of all others, such as
a pretrained body, it holds one short digest, and `Posterior.check` compares it with the network's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchbayes.core.names import dormant, named_modules, named_parameters, named_weights, unwrapped
from torchbayes.core.shards import is_sharded, whole

__all__ = ["described", "digest_of_rest", "held_names"]


def described(model: nn.Module, held: Iterable[str]) -> dict[str, str]:
    """Return what every posterior is told about its network: `model_name` and `rest`."""
    name = type(unwrapped(model)).__name__
    return {"model_name": name, "rest": digest_of_rest(model, held)}


def held_names(
    model: nn.Module, trained: Collection[str] | None = None, also: Iterable[str] = ()
) -> list[str]:
    """Name the weights and buffers of `model` that a posterior has to hold.

    These are everything if all parameters are trained; otherwise the trained parameters, the buffers of the
    modules that have one, and the buffers of modules in training mode, which batch norm rewrites in every
    forward pass.

    Args:
        model: The network.
        trained: Names of the trained parameters; those that require a gradient if None.
        also: Names of buffers to hold in any case, such as those of modules that were in training mode.
    """
    parameters = named_parameters(model)
    names = {
        name
        for name, p in parameters.items()
        if (p.requires_grad if trained is None else name in trained)
    }
    if len(names) == len(parameters):
        return list(named_weights(model))
    names |= set(also)
    for short, _, module in named_modules(model):
        prefix = f"{short}." if short else ""
        if module.training or any(prefix + leaf in names for leaf in module._parameters):
            names |= {
                prefix + n for n in module._buffers.keys() - module._non_persistent_buffers_set
            }
    return [name for name in named_weights(model) if name in names]


# The digest of a model's parameters that are not held, with all that tells whether it still is the one.
_known: WeakKeyDictionary[nn.Module, tuple[Hashable, str]] = WeakKeyDictionary()


def digest_of_rest(model: nn.Module, held: Iterable[str]) -> str:
    """Return a digest of the parameters and buffers of `model` that are not held; "" if there are none.

    It depends on their names, types, shapes and numbers, and on nothing else: it is the same on every device
    and for a wrapped network. Buffers that are no part of `model.state_dict()` do not count.

    Hashing 25 million weights takes a tenth of a second, so that the parameters' digest is kept until one
    of them is another tensor, is in another place, or has another version, which torch counts at every
    change in place. A change through `p.data`, which torch does not count, shows in the first entry, which
    is compared too. Buffers are hashed every time: batch norm changes them without counting.

    Args:
        model: The network.
        held: Names of parameters and buffers that do not count.
    """
    held = frozenset(held)
    unused = dormant(model)
    parameters = {
        n: p for n, p in named_parameters(model).items() if n not in held and id(p) not in unused
    }
    passing = {
        f"{short}.{leaf}" if short else leaf
        for short, _, module in named_modules(model)
        for leaf in module._non_persistent_buffers_set
    }
    buffers = {
        name: tensor
        for name, tensor in named_weights(model).items()
        if not isinstance(tensor, nn.Parameter) and name not in held | passing
        and id(tensor) not in unused
    }  # fmt: skip
    if not parameters and not buffers:
        return ""
    if any(is_sharded(p) for p in parameters.values()):  # processes must agree on whether to gather
        start = _digest(parameters)
        return _digest(buffers, start) if buffers else start
    same = tuple((name, id(p), p.data_ptr(), _version(p)) for name, p in parameters.items())
    key = (same, _first_entries(parameters.values()))
    known = _known.get(model)
    if known is None or known[0] != key:
        known = key, _digest(parameters)
        _known[model] = known
    return known[1] if not buffers else _digest(buffers, known[1])


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _first_entries(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    first = [t[(0,) * t.dim()].double() for t in map(_real, tensors) if t.numel()]
    return tuple(torch.stack(first).tolist()) if first else ()


def _digest(tensors: Mapping[str, Tensor], start: str = "") -> str:
    state = hashlib.blake2b(start.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = whole(tensors[name].detach()).cpu().contiguous()
        state.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
