from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from torchbayes.core.batch import batch_weights
from torchbayes.data import batch_len, call, slice_batch, split_batch, to_device

X, Y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0])


def test_a_tensor_is_inputs_without_targets() -> None:
    assert split_batch(X) == (X, None)


@pytest.mark.parametrize("kind", [tuple, list])
def test_pairs_are_inputs_and_targets(kind: type) -> None:
    inputs, targets = split_batch(kind([X, Y]))
    assert inputs is X
    assert targets is Y
    assert split_batch(kind([X])) == (X, None)


def test_inputs_of_a_pair_may_be_nested() -> None:
    inputs, targets = split_batch(({"a": X, "b": X}, Y))
    assert list(inputs) == ["a", "b"]
    assert targets is Y
    inputs, _ = split_batch([(X, X), Y])
    assert isinstance(inputs, tuple)


@pytest.mark.parametrize("key", ["target", "targets", "label", "labels", "y"])
def test_targets_of_a_dict_are_found_by_name(key: str) -> None:
    inputs, targets = split_batch({"x": X, key: Y, "mask": X})
    assert targets is Y
    assert list(inputs) == ["x", "mask"]


def test_a_dict_without_targets_and_a_mapping_that_is_no_dict() -> None:
    assert split_batch({"x": X})[1] is None
    inputs, targets = split_batch(collections.UserDict(x=X, labels=Y))
    assert list(inputs) == ["x"]
    assert targets is Y


def test_a_third_entry_of_real_numbers_is_weights() -> None:
    weights = torch.rand(len(X))
    assert split_batch((X, Y, weights)) == (X, Y)
    assert batch_weights([X, Y, weights]) is weights
    for batch in ((X, Y), X, {"x": X, "y": Y}, (X, X, Y)):
        assert batch_weights(batch) is None


def test_batches_that_are_not_understood_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="has 3 entries"):
        split_batch((X, X, Y))  # Y are no weights, but X may well be two inputs
    with pytest.raises(ValueError, match="has 0 entries"):
        split_batch(())
    with pytest.raises(ValueError, match="'label' and 'y'"):
        split_batch({"x": X, "y": Y, "label": Y})
    with pytest.raises(TypeError, match="not str"):
        split_batch("abc")


def test_call_follows_the_form_of_the_inputs() -> None:
    class Sum(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor | float = 1.0) -> torch.Tensor:
            return a + 10 * b

    assert torch.equal(call(Sum(), X), X + 10)
    assert torch.equal(call(Sum(), (X, X)), 11 * X)
    assert torch.equal(call(Sum(), [X, X]), 11 * X)
    assert torch.equal(call(Sum(), {"b": X, "a": 2 * X}), 12 * X)


def test_lengths_slices_and_devices_reach_into_nested_inputs() -> None:
    nested = {"scale": torch.tensor(2.0), "x": (X, [Y]), "name": "n"}
    assert batch_len(nested) == 3
    part = slice_batch(nested, 1, 3)
    assert torch.equal(part["x"][0], X[1:3])
    assert torch.equal(part["x"][1][0], Y[1:3])
    assert part["name"] == "n"
    assert part["scale"] == 2
    moved = to_device(nested, "meta")
    assert moved["x"][0].device.type == "meta"
    assert moved["x"][1][0].device.type == "meta"


def test_length_of_inputs_without_examples_is_an_error() -> None:
    with pytest.raises(ValueError, match="batch dimension"):
        batch_len({"scale": torch.tensor(2.0)})
