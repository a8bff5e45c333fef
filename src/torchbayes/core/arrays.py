"""NumPy arrays, data frames and data sets as tensors and batches of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torchbayes.core.batch import as_labels, batch_weights, map_leaves, split_batch

__all__ = ["as_inputs", "as_targets", "as_tensors", "in_memory", "is_array"]

_NUMBERS = "biuf"
"""NumPy's kinds of booleans, integers and floating-point numbers."""

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

_BATCH = 256
"""Examples that are read from a data set at a time, to be predicted."""


def is_array(value: Any) -> bool:
    """Whether `value` is a NumPy array, or a data frame or series of pandas or another library."""
    return isinstance(value, np.ndarray) or hasattr(value, "to_numpy")


def as_tensors(value: Any, what: str = "the inputs") -> Any:
    """Replace every array and data frame of `value`, however nested, by a tensor.

    Args:
        value: A tensor, an array, a data frame, or a tuple, list or dictionary of them.
        what: What to call it in an error.

    Example:
        >>> import numpy as np
        >>> as_tensors({"x": np.arange(3)})
        {'x': tensor([0, 1, 2])}
    """
    return map_leaves(value, lambda leaf: _tensor(leaf, what) if is_array(leaf) else leaf)


def as_inputs(value: Any) -> Any:
    """Return what a user gives to predict, with tensors for arrays and a loader for a data set.

    Args:
        value: Inputs, a loader of batches, or a torch data set.
    """
    if isinstance(value, Mapping):
        # A Hugging Face batch comes with its labels, which a prediction must not see.
        return as_tensors({key: part for key, part in value.items() if key != "labels"})
    if is_array(value) or isinstance(value, tuple):
        return as_tensors(value)
    if isinstance(value, DataLoader) and isinstance(value.sampler, _RANDOM):
        warnings.warn(
            "the DataLoader shuffles, and predictions are in the order in which it reads the data: give one "
            "with shuffle=False, so that they can be compared with the data",
            stacklevel=3,
        )
    map_style = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    if isinstance(value, IterableDataset) or (
        map_style and not isinstance(value, (Tensor, list, str))
    ):
        # A generator of its own: reading data does not change what torch's global one gives next.
        return DataLoader(value, _BATCH, generator=torch.Generator())
    return value


def as_targets(value: Any) -> Tensor:
    """Return targets given as a tensor, an array, a series or a list of numbers, as a tensor.

    Example:
        >>> as_targets([True, False])
        tensor([1, 0])
    """
    if not isinstance(value, Tensor):
        array = value if is_array(value) else np.asarray(value)
        value = _tensor(array, "the targets")
    return as_labels(value)


def in_memory(data: Any) -> tuple[Any, Tensor, Any] | None:
    """Return inputs, targets and weights, if any, of data in memory, as tensors; None for other data."""
    weights = None
    if isinstance(data, TensorDataset):
        data = data.tensors  # no need to gather example by example
    if isinstance(data, Tensor) or is_array(data):
        raise TypeError(
            f"cannot train on a {type(data).__name__} alone: give the targets too, as in fit(model, X, y)"
        )
    if isinstance(data, Mapping):
        inputs, targets = split_batch(data)
    elif isinstance(data, tuple):
        weights = batch_weights(data)
        if len(data) != 2 and weights is None:
            raise ValueError(
                f"the data are {len(data)} parts, but inputs and targets are 2: put several inputs into a "
                "tuple or dictionary of their own, as in ((x1, x2), targets)"
            )
        inputs, targets = data[:2]
    elif (
        isinstance(data, list)
        and len(data) == 2
        and (isinstance(data[1], Tensor) or is_array(data[1]))
    ):
        inputs, targets = data
    else:
        return None
    if targets is None:
        found = f" among {', '.join(map(repr, inputs))}" if isinstance(inputs, Mapping) else ""
        raise ValueError(
            f"the data have no targets{found}: give them too, as in fit(model, inputs, targets), or in a "
            "dictionary under 'labels'"
        )
    return as_tensors(inputs), as_targets(targets), weights


def _tensor(value: Any, what: str) -> Tensor:
    array = _array(value, what)
    if array.dtype.kind not in _NUMBERS:
        kind = "strings" if array.dtype.kind in "US" else f"of type {array.dtype}"
        raise TypeError(f"{what} are {kind}, not numbers: {_remedy(what)}")
    if array.dtype.byteorder not in "=|" or array.dtype == np.longdouble:
        array = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    # A copy where torch could not keep its promise to write to the memory, or read it backwards.
    writable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if writable else np.array(array, order="C"))


def _array(value: Any, what: str) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    columns = getattr(value, "columns", None)
    if columns is None:
        return np.asarray(value.to_numpy())
    arrays = [np.asarray(value[name].to_numpy()) for name in columns]
    for name, array in zip(columns, arrays, strict=True):
        if array.dtype.kind not in _NUMBERS:
            raise TypeError(f"column {name!r} of {what} is not numeric: {_remedy(what)}")
    return np.stack(arrays, 1)


def _remedy(what: str) -> str:
    if "target" in what:
        return "number the classes from 0, as sklearn.preprocessing.LabelEncoder does"
    return "leave it out or encode it as numbers, and convert what is numeric with astype(float)"
