"""Arrays as tensors, and what is converted for a network and what is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from torchbayes.core.arrays import as_targets, as_tensors
from torchbayes.core.batch import network_dtype, suited


def test_arrays_of_any_layout_become_equal_tensors() -> None:
    array = np.arange(12.0).reshape(3, 4)
    locked = array.copy()
    locked.flags.writeable = False
    for one in (array, np.asfortranarray(array), array[::-1], locked, array.astype(">f4"),
                array.astype(np.longdouble)):  # fmt: skip
        nested = as_tensors({"x": (one, [one, "a word"])})
        (first, (second, word)) = nested["x"]
        assert word == "a word"
        for tensor in (first, second):
            assert tensor.tolist() == one.tolist()


def test_an_array_is_not_copied_without_need() -> None:
    array = np.zeros(3)
    as_tensors(array)[0] = 1
    assert array[0] == 1


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64"])
def test_labels_become_int64(dtype: str) -> None:
    labels = as_targets(np.array([0, 1, 1]).astype(dtype))
    assert labels.dtype is torch.int64
    assert labels.tolist() == [0, 1, 1]


def test_real_targets_keep_their_type() -> None:
    assert as_targets(np.zeros(3, np.float32)).dtype is torch.float32
    assert as_targets([0.5, 1.5]).dtype is torch.float64


@pytest.mark.parametrize("targets", [["a", "b"], [None, 1], np.array(["2020"], dtype="M8[Y]")])
def test_targets_that_are_no_numbers_get_one_sentence(targets: object) -> None:
    with pytest.raises(TypeError, match=r"the targets are .* number the classes from 0"):
        as_targets(targets)


def test_only_single_and_double_precision_are_exchanged() -> None:
    single, double, half = (network_dtype(nn.Linear(1, 1).to(t)) for t in
                            (torch.float32, torch.float64, torch.bfloat16))  # fmt: skip
    for given, network, expected in (
        (torch.float64, single, torch.float32),
        (torch.float32, double, torch.float64),
        (torch.float64, half, torch.bfloat16),
        (torch.float32, half, torch.float32),
        (torch.float16, single, torch.float16),
        (torch.int64, single, torch.int64),
        (torch.uint8, double, torch.uint8),
    ):
        moved = suited({"x": torch.zeros(2).to(given)}, "cpu", network)
        assert moved["x"].dtype is expected
