"""Turn what a user gives as data into a loader, and check it before training starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torchbayes.core.batch import call, slice_batch, split_batch, to_device
from torchbayes.data import Split
from torchbayes.data.loader import BatchLoader
from torchbayes.data.order import EpochLoader
from torchbayes.data.stream import StreamLoader
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood, as_likelihood

__all__ = ["as_loader", "check_data", "device_of", "likelihood_for"]


def as_loader(
    data: Any,
    batch_size: int,
    seed: int,
    transform: Callable[[Any, torch.Generator], Any] | None,
    shard: tuple[int, int],
    *,
    shuffle: bool = True,
) -> EpochLoader:
    """Return a loader for what a user gave as data."""
    rank, world = shard
    if isinstance(data, EpochLoader):
        return data
    if isinstance(data, Split):
        data = (data.inputs, data.targets)
    elif isinstance(data, TensorDataset):
        data = data.tensors  # in memory: no need to gather example by example
    if isinstance(data, (tuple, list)) and len(data) == 2:
        inputs, targets = data
        if isinstance(targets, Tensor):
            return BatchLoader(
                inputs, targets, batch_size, shuffle=shuffle, seed=seed, transform=transform,
                rank=rank, world_size=world,
            )  # fmt: skip
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Tensor):
        return StreamLoader(
            data, batch_size, shuffle=shuffle, seed=seed, transform=transform,
            rank=rank, world_size=world, workers=0,
        )  # fmt: skip
    raise TypeError(
        f"cannot train on a {type(data).__name__}: pass a pair of tensors (inputs, targets), a map-style "
        "torch data set, or a torchbayes loader"
    )


def likelihood_for(loader: EpochLoader, given: Any) -> Likelihood:
    """Return the given likelihood, or infer it from the type of the targets."""
    if given is not None:
        return as_likelihood(given)
    _, targets = split_batch(next(iter(loader.batches(0))))
    if targets is not None and targets.is_floating_point():
        return GaussianNoise(learned=True)
    return Categorical()


def check_data(model: nn.Module, loader: EpochLoader, likelihood: Likelihood) -> None:
    """Check that the network takes a batch and that the targets fit, before training starts."""
    inputs, targets = split_batch(next(iter(loader.batches(0))))
    inputs = to_device(slice_batch(inputs, 0, 2), device_of(model))
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
    if isinstance(likelihood, Categorical):
        known = getattr(loader, "targets", None)
        _check_labels(known if isinstance(known, Tensor) else targets, outputs)


def _check_labels(targets: Tensor | None, outputs: Tensor) -> None:
    if targets is None:
        raise ValueError("the training set has no targets: give pairs of inputs and targets")
    if targets.is_floating_point():
        raise ValueError(
            f"targets are {targets.dtype}, which are not class labels: convert them to int64, or pass "
            "likelihood=torchbayes.GaussianNoise(…) for regression"
        )
    classes = outputs.shape[1]
    for bad in (int(targets.min()), int(targets.max())):
        if not 0 <= bad < classes:
            raise ValueError(
                f"label {bad} is out of range: the network has {classes} classes, 0 to {classes - 1}"
            )


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))
