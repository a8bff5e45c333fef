"""Turn what a user gives as data into a loader, and check it before training starts."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from torchbayes.core.arrays import in_memory, is_array
from torchbayes.core.batch import (
    as_labels,
    batch_weights,
    call,
    device_of,
    network_dtype,
    slice_batch,
    split_batch,
    suited,
)
from torchbayes.core.device import forked_random_numbers
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.core.parameters import kept_modes
from torchbayes.data import Split
from torchbayes.data.foreign import ForeignLoader
from torchbayes.data.loader import BatchLoader, WholeLoader
from torchbayes.data.order import EpochLoader
from torchbayes.data.stream import StreamLoader
from torchbayes.likelihood import GaussianNoise, Likelihood, as_likelihood, inferred_likelihood
from torchbayes.train.budget import default_batch

# Targets this far from 0, or whose spread is so much above or below 1, are not standardised.
_FAR = 20.0

__all__ = [
    "as_loader",
    "device_of",
    "leave_out_singles",
    "likelihood_for",
    "spelled",
]

_LOG = logging.getLogger("torchbayes")


def spelled(train_set: Any, targets: Any, method: str) -> tuple[Any, str]:
    """Return the training set and the method of each of `fit`'s spellings.

    They are `fit(model, data, "vogn")`, `fit(model, data, method="vogn")` and `fit(model, X, y, "vogn")`.
    """
    if targets is None:
        return train_set, method
    if isinstance(targets, str):
        if method not in ("map", targets):
            raise ValueError(f"the method is given twice, {targets!r} and {method!r}: keep one")
        return train_set, targets
    if not isinstance(targets, (list, tuple)) and not _is_numbers(targets):
        given = targets if isinstance(targets, type) else type(targets)
        raise TypeError(
            f"the third argument of fit is a {given.__name__}: expected the targets of the training set, or "
            'the name of a method such as "vogn"'
        )
    return (train_set, targets), method


def as_loader(
    data: Any,
    batch_size: int | None,
    seed: int,
    transform: Callable[[Any, torch.Generator], Any] | None,
    shard: tuple[int, int],
    *,
    shuffle: bool = True,
    train_size: int | None = None,
    weights: Any = None,
    split: bool = True,
) -> EpochLoader:
    """Return a loader for what a user gave as data.

    Args:
        data: Any of the forms that `fit` takes.
        batch_size: Examples per batch, where the data do not come in batches; by their number if None.
        seed: Seed of order and augmentation.
        transform: Applied to every batch of inputs.
        shard: Rank of this process and number of processes.
        shuffle: Whether the data are to be trained on, in random order, or read once from first to last.
        train_size: Number of examples, for data that cannot tell it.
        weights: One weight per example, for data in memory.
        split: Whether the data can be cut into batches; otherwise they are one, passed whole.
    """
    rank, world = shard
    if weights is not None and not (isinstance(weights, Tensor) and weights.is_floating_point()):
        weights = torch.as_tensor(weights, dtype=torch.get_default_dtype())
    if isinstance(data, EpochLoader) and weights is None and split:
        return data
    given = in_memory((data.inputs, data.targets) if isinstance(data, Split) else data)
    if given is not None:
        inputs, targets, own = given
        weights = own if weights is None else weights
        if not split:
            return WholeLoader(
                inputs, targets, seed=seed, transform=transform, weights=weights, world_size=world
            )
        return BatchLoader(
            inputs, targets, batch_size or default_batch(_examples(inputs)), shuffle=shuffle,
            seed=seed, transform=transform, rank=rank, world_size=world, weights=weights,
        )  # fmt: skip
    if weights is not None or not split:
        what = "split=False needs" if not split else "weights are for"
        raise ValueError(
            f"{what} inputs and targets in memory, not a {type(data).__name__}: pass a pair, or let the "
            "loader give batches (inputs, targets, weights)"
        )
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size or default_batch(train_size or 10**6))
    elif _is_map_style(data):
        return StreamLoader(
            data, batch_size or default_batch(len(data)), shuffle=shuffle, seed=seed, transform=transform,
            rank=rank, world_size=world, workers=0,
        )  # fmt: skip
    if (isinstance(data, Iterable) or callable(data)) and not isinstance(data, str):
        return ForeignLoader(
            data, seed=seed, train_size=train_size, transform=transform,
            rank=rank, world_size=world, whole=not shuffle,
        )  # fmt: skip
    raise TypeError(
        f"cannot train on a {type(data).__name__}: pass inputs and targets, a torch data set or a DataLoader"
    )


def _check_scale(targets: Tensor) -> None:
    """Warn of targets that no default suits: priors, noise and steps are for numbers of about unit size."""
    values = targets.double()
    mean, std = float(values.mean()), float(values.std()) if values.numel() > 1 else 1.0
    if abs(mean) > _FAR or not 1 / _FAR < std < _FAR:
        warnings.warn(
            f"the targets have mean {mean:.3g} and standard deviation {std:.3g}, but priors, noise and steps "
            "are made for numbers of about unit size: standardise them (torchbayes.BayesianRegressor does)",
            stacklevel=4,
        )


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) or is_array(value)


def _examples(inputs: Any) -> int:
    """Return the number of examples of inputs in memory."""
    return next(len(t) for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.dim() > 0)


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str)


def likelihood_for(
    model: nn.Module, loader: EpochLoader, given: Any, output: Output = None
) -> Likelihood:
    """Return the given likelihood, or infer it from targets and outputs; check that the targets fit."""
    batch = loader.peek()
    inputs, targets = split_batch(batch)
    if targets is None:
        raise ValueError("the training set has no targets: give pairs of inputs and targets")
    outputs = _outputs(model, slice_batch(inputs, 0, 2) if loader.splits else inputs, output)
    known = getattr(loader, "targets", None)
    targets = as_labels(known if isinstance(known, Tensor) else targets)
    likelihood = inferred_likelihood(outputs, targets) if given is None else as_likelihood(given)
    likelihood.check(outputs.cpu(), targets)
    if isinstance(likelihood, GaussianNoise):
        _check_scale(targets)
    takes = inspect.signature(likelihood.loss).parameters
    if batch_weights(batch) is not None and "weights" not in takes:
        raise ValueError(
            f"there are weights of the examples, but {type(likelihood).__name__}.loss does not take any: "
            "give it a third argument, weights"
        )
    return likelihood


def _outputs(model: nn.Module, inputs: Any, output: Output) -> Tensor:
    """Return what the likelihood takes of the network's outputs, in evaluation mode."""
    inputs = suited(inputs, device_of(model), network_dtype(model))
    try:
        with torch.no_grad(), kept_modes(model):
            returned = call(model.eval(), inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot take inputs of {_described(inputs)} "
            f"({str(error).splitlines()[0]}): {_remedy(inputs)}"
        ) from error
    return output_tensor(returned, output, network=type(model).__name__)


def leave_out_singles(model: nn.Module, loader: EpochLoader) -> None:
    """Leave out the batches of which a process would get one example, if batch norm cannot take one.

    Raises:
        ValueError: If all batches are so small, or the loader makes its own batches.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms or not loader.splits or loader.smallest_share() != 1:
        return
    if _takes_one(model, slice_batch(split_batch(loader.peek())[0], 0, 1)):
        return
    remedy = loader.leave_out_last()
    if remedy is not None:
        raise ValueError(
            f"{type(model).__name__} has batch norm, which cannot be trained on one example, but a process "
            f"gets batches of one: {remedy}"
        )
    _LOG.info(
        "the last batch of every epoch has one example, which batch norm cannot be trained on: it is left out"
    )


def _takes_one(model: nn.Module, inputs: Any) -> bool:
    """Whether the network can be called with one example in training mode; nothing of it is changed."""
    inputs = suited(inputs, device_of(model), network_dtype(model))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), forked_random_numbers():
            call(model, inputs)
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            return False
        raise
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
    return True


def _described(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return f"shape {tuple(inputs.shape)}"
    return f"the form {type(inputs).__name__}"


def _remedy(inputs: Any) -> str:
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        kind = str(inputs.dtype).removeprefix("torch.")
        return f"the inputs are {kind}; convert them to float32 if they are numbers, not indices"
    return "choose a model that fits the data"
