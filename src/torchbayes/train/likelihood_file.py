"""A likelihood on disk: its kind, its arguments and what it has learned, such as a noise level.

The torchbayes kinds can be read again without more. Of any other, such as a subclass or a function of the
user's, a file holds the parameters and buffers alone: whoever reads it gives the object, which receives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.errors import FileError, RunError
from torchbayes.core.storage import read_tensor_file, write_tensor_file
from torchbayes.likelihood import (
    Bernoulli,
    Categorical,
    GaussianNoise,
    Likelihood,
    Poisson,
    StudentT,
    as_likelihood,
)

__all__ = ["give", "read_likelihood", "write_likelihood"]

_FORMAT, _VERSION = "torchbayes-likelihood", 1
_KINDS: dict[str, type[Likelihood]] = {
    kind.__name__: kind for kind in (Bernoulli, Categorical, GaussianNoise, Poisson, StudentT)
}


def _tensors(likelihood: Likelihood) -> dict[str, Tensor]:
    """Return all parameters and buffers, also those that are no part of a `state_dict`."""
    return dict(likelihood.named_parameters()) | dict(likelihood.named_buffers())


def write_likelihood(path: Path, likelihood: Likelihood) -> None:
    """Write a likelihood, as far as a file can hold it."""
    # A subclass may do anything in its loss.
    known = _KINDS.get(type(likelihood).__name__) is type(likelihood)
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "kind": type(likelihood).__name__,
        "arguments": likelihood.arguments() if known else None,
    }
    write_tensor_file(path, _tensors(likelihood), header)


def read_likelihood(path: Path, given: Any = None) -> Likelihood:
    """Read a likelihood.

    Args:
        path: A file of `write_likelihood`.
        given: The likelihood, for one that a file cannot hold: it receives what was learned.

    Raises:
        RunError: If the file is damaged, or there is no such likelihood.
    """
    header, tensors = read_tensor_file(path, _FORMAT, _VERSION, "torchbayes likelihood", RunError)
    kind, arguments = header.get("kind"), header.get("arguments")
    if given is not None:
        return give(as_likelihood(given), tensors, f"{path}, of a {kind}")
    if arguments is None:
        raise RunError(
            f"the run was trained with a likelihood of its own, {kind}, which a file cannot hold: pass it, "
            f"as in load_run(folder, model, likelihood={kind}(…)), and it receives what was learned"
        )
    try:
        made = _KINDS[str(kind)](**arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path} holds a likelihood {kind!r} that this torchbayes does not know: upgrade torchbayes, or "
            "pass likelihood="
        ) from error
    return give(made, tensors, str(path))


@torch.no_grad()
def give(likelihood: Likelihood, tensors: Mapping[str, Tensor], where: str) -> Likelihood:
    """Return the likelihood with these parameters and buffers.

    Args:
        likelihood: The likelihood.
        tensors: Its parameters and buffers by name.
        where: What they are from, for messages.
    """
    own = _tensors(likelihood)
    for name, tensor in tensors.items():
        place, _, leaf = name.rpartition(".")
        module = likelihood.get_submodule(place) if _has(likelihood, place) else None
        if name in own and own[name].shape == tensor.shape:
            own[name].data = tensor.to(own[name].device)
        elif module is not None and leaf in module._buffers and module._buffers[leaf] is None:
            module._buffers[leaf] = tensor
        else:
            raise FileError(
                f"{where} does not fit {type(likelihood).__name__}: it has {name!r} of shape "
                f"{tuple(tensor.shape)}; pass the likelihood that the run was trained with"
            )
    missing = likelihood.state_dict().keys() - tensors.keys()
    if missing:
        raise FileError(
            f"{where} does not fit {type(likelihood).__name__}, whose {min(missing)!r} it does not have: "
            "pass the likelihood that the run was trained with"
        )
    return likelihood


def _has(likelihood: Likelihood, place: str) -> bool:
    return place in dict(likelihood.named_modules())
