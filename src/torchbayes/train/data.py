"""Turn what a user gives as data into a loader, and check it before training starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torchbayes.core.arrays import as_targets, as_tensors, is_array
from torchbayes.core.batch import as_labels, call, network_dtype, slice_batch, split_batch, suited
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.data import Split
from torchbayes.data.foreign import ForeignLoader
from torchbayes.data.loader import BatchLoader
from torchbayes.data.order import EpochLoader
from torchbayes.data.stream import StreamLoader
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood, as_likelihood

__all__ = ["as_loader", "check_data", "check_device", "device_of", "likelihood_for", "spelled"]


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
    batch_size: int,
    seed: int,
    transform: Callable[[Any, torch.Generator], Any] | None,
    shard: tuple[int, int],
    *,
    shuffle: bool = True,
    train_size: int | None = None,
) -> EpochLoader:
    """Return a loader for what a user gave as data.

    Args:
        data: Any of the forms that `fit` takes.
        batch_size: Examples per batch, where the data do not come in batches.
        seed: Seed of order and augmentation.
        transform: Applied to every batch of inputs.
        shard: Rank of this process and number of processes.
        shuffle: Whether the data are to be trained on, in random order, or read once from first to last.
        train_size: Number of examples, for data that cannot tell it.
    """
    rank, world = shard
    if isinstance(data, EpochLoader):
        return data
    pair = _in_memory(data)
    if pair is not None:
        return BatchLoader(
            *pair, batch_size, shuffle=shuffle, seed=seed, transform=transform,
            rank=rank, world_size=world,
        )  # fmt: skip
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size)
    elif _is_map_style(data):
        return StreamLoader(
            data, batch_size, shuffle=shuffle, seed=seed, transform=transform,
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


def _in_memory(data: Any) -> tuple[Any, Tensor] | None:
    """Return the inputs and targets of data that are in memory, as tensors; None for other data."""
    if isinstance(data, Split):
        data = (data.inputs, data.targets)
    elif isinstance(data, TensorDataset):
        data = data.tensors  # no need to gather example by example
    if _is_numbers(data):
        raise TypeError(
            f"cannot train on a {type(data).__name__} alone: give the targets too, as in fit(model, X, y)"
        )
    if isinstance(data, Mapping):
        inputs, targets = split_batch(data)
    elif isinstance(data, tuple):
        if len(data) != 2:
            raise ValueError(
                f"the data are {len(data)} parts, but inputs and targets are 2: put several inputs into a "
                "tuple or dictionary of their own, as in ((x1, x2), targets)"
            )
        inputs, targets = data
    elif isinstance(data, list) and len(data) == 2 and _is_numbers(data[1]):
        inputs, targets = data
    else:
        return None
    if targets is None:
        found = f" among {', '.join(map(repr, inputs))}" if isinstance(inputs, Mapping) else ""
        raise ValueError(
            f"the data have no targets{found}: give them too, as in fit(model, inputs, targets), or in a "
            "dictionary under 'labels'"
        )
    return as_tensors(inputs), as_targets(targets)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) or is_array(value)


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str)


def likelihood_for(loader: EpochLoader, given: Any) -> Likelihood:
    """Return the given likelihood, or infer it from the type of the targets."""
    if given is not None:
        return as_likelihood(given)
    _, targets = split_batch(loader.peek())
    if targets is not None and targets.is_floating_point():
        _check_one_hot(targets)
        return GaussianNoise(learned=True)
    return Categorical()


def check_data(
    model: nn.Module, loader: EpochLoader, likelihood: Likelihood, output: Output = None
) -> None:
    """Check that the network takes a batch and that the targets fit, before training starts."""
    inputs, targets = split_batch(loader.peek())
    inputs = suited(slice_batch(inputs, 0, 2), device_of(model), network_dtype(model))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            returned = call(model, inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot take inputs of {_described(inputs)} "
            f"({str(error).splitlines()[0]}): {_remedy(inputs)}"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    outputs = output_tensor(returned, output, network=type(model).__name__)
    if isinstance(likelihood, Categorical):
        known = getattr(loader, "targets", None)
        known = known if isinstance(known, Tensor) else targets
        _check_labels(None if known is None else as_labels(known), outputs)


def _check_labels(targets: Tensor | None, outputs: Tensor) -> None:
    if targets is None:
        raise ValueError("the training set has no targets: give pairs of inputs and targets")
    if targets.is_floating_point():
        _check_one_hot(targets)
        raise ValueError(
            f"targets are {targets.dtype}, which are not class labels: convert them to int64, or pass "
            "likelihood=torchbayes.GaussianNoise(…) for regression"
        )
    if outputs.dim() < 2:
        return  # the likelihood says what is wrong
    classes, wanted = outputs.shape[1], tuple(outputs.shape[2:])
    if tuple(targets.shape[1:]) != wanted:
        hint = "pass targets.argmax(1)" if targets.shape[1:] == (classes,) else "change their shape"
        if targets.shape[1:] == (1,):
            hint = "pass targets[:, 0]"
        raise ValueError(
            f"the targets have shape {tuple(targets.shape)}, but labels for these outputs have shape "
            f"{(len(targets), *wanted)}: {hint}"
        )
    for bad in (int(targets.min()), int(targets.max())):
        if not 0 <= bad < classes:
            raise ValueError(
                f"label {bad} is out of range: the network has {classes} classes, 0 to {classes - 1}"
            )


def _check_one_hot(targets: Tensor) -> None:
    """Raise a `ValueError` if real targets look like classes, one-hot coded."""
    if targets.dim() != 2 or targets.shape[1] < 2 or len(targets) < 2:
        return
    if bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all()):
        raise ValueError(
            f"the targets, {targets.dtype} of shape {tuple(targets.shape)}, look like one-hot classes: pass "
            "targets.argmax(1), or a likelihood such as torchbayes.GaussianNoise(learned=True) if they are "
            "measurements"
        )


def _described(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return f"shape {tuple(inputs.shape)}"
    return f"the form {type(inputs).__name__}"


def _remedy(inputs: Any) -> str:
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        kind = str(inputs.dtype).removeprefix("torch.")
        return f"the inputs are {kind}; convert them to float32 if they are numbers, not indices"
    return "choose a model that fits the data"


def check_device(device: str | torch.device | None) -> None:
    """Raise a `ValueError` if there is no such device."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device is {str(device)!r}, which this torch cannot use ({str(error).splitlines()[0]}): leave "
            "it out to train where the model is"
        ) from error


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))
