"""Turn what a user gives as data into a loader, and check it before training starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torchbayes.core.batch import batch_weights, call, slice_batch, split_batch, to_device
from torchbayes.data import Split
from torchbayes.data.loader import BatchLoader, WholeLoader
from torchbayes.data.order import EpochLoader
from torchbayes.data.stream import StreamLoader
from torchbayes.likelihood import Likelihood, as_likelihood, inferred_likelihood

__all__ = ["as_loader", "device_of", "likelihood_for"]


def as_loader(
    data: Any,
    batch_size: int,
    seed: int,
    transform: Callable[[Any, torch.Generator], Any] | None,
    shard: tuple[int, int],
    *,
    shuffle: bool = True,
    weights: Tensor | None = None,
    split: bool = True,
) -> EpochLoader:
    """Return a loader for what a user gave as data."""
    rank, world = shard
    weights = None if weights is None else torch.as_tensor(weights, dtype=torch.get_default_dtype())
    if isinstance(data, EpochLoader) and weights is None and split:
        return data
    if isinstance(data, Split):
        data = (data.inputs, data.targets)
    elif isinstance(data, TensorDataset):
        data = data.tensors  # in memory: no need to gather example by example
    if isinstance(data, (tuple, list)) and batch_weights(data) is not None and weights is None:
        data, weights = data[:2], data[2]
    if isinstance(data, (tuple, list)) and len(data) == 2:
        inputs, targets = data
        if isinstance(targets, Tensor) and not split:
            return WholeLoader(
                inputs, targets, seed=seed, transform=transform, weights=weights, world_size=world
            )
        if isinstance(targets, Tensor):
            return BatchLoader(
                inputs, targets, batch_size, shuffle=shuffle, seed=seed, transform=transform,
                rank=rank, world_size=world, weights=weights,
            )  # fmt: skip
    if weights is not None or not split:
        what = "split=False needs" if not split else "weights are for"
        raise ValueError(
            f"{what} a pair of tensors (inputs, targets), not a {type(data).__name__}: pass a pair, or let "
            "the loader give batches (inputs, targets, weights)"
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Tensor):
        return StreamLoader(
            data, batch_size, shuffle=shuffle, seed=seed, transform=transform,
            rank=rank, world_size=world, workers=0,
        )  # fmt: skip
    raise TypeError(
        f"cannot train on a {type(data).__name__}: pass a pair of tensors (inputs, targets), a map-style "
        "torch data set, or a torchbayes loader"
    )


def likelihood_for(model: nn.Module, loader: EpochLoader, given: Any) -> Likelihood:
    """Return the given likelihood, or infer it from targets and outputs; check that the targets fit."""
    batch = next(iter(loader.batches(0)))
    inputs, targets = split_batch(batch)
    if targets is None:
        raise ValueError("the training set has no targets: give pairs of inputs and targets")
    outputs = _outputs(model, slice_batch(inputs, 0, 2) if loader.splits else inputs)
    known = getattr(loader, "targets", None)
    targets = known if isinstance(known, Tensor) else targets
    likelihood = inferred_likelihood(outputs, targets) if given is None else as_likelihood(given)
    likelihood.check(outputs.cpu(), targets)
    takes = inspect.signature(likelihood.loss).parameters
    if batch_weights(batch) is not None and "weights" not in takes:
        raise ValueError(
            f"there are weights of the examples, but {type(likelihood).__name__}.loss does not take any: "
            "give it a third argument, weights"
        )
    return likelihood


def _outputs(model: nn.Module, inputs: Any) -> Tensor:
    """Return the network's outputs in evaluation mode, checked to be a tensor."""
    inputs = to_device(inputs, device_of(model))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            outputs = call(model, inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(
            f"{type(model).__name__} cannot take inputs of shape {shape} ({str(error).splitlines()[0]}): "
            "choose a model that fits the data"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"{type(model).__name__} returns a {type(outputs).__name__}: fit needs a module that returns one "
            "tensor; wrap it in a module that selects one"
        )
    return outputs


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))
