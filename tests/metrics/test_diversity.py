"""Faults of several networks against a count by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from torchbayes.metrics import double_fault, fault_counts


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, 200)
    predictions = np.where(rng.random((4, 200)) < 0.6, targets, rng.integers(0, 3, (4, 200)))
    return torch.from_numpy(predictions), torch.from_numpy(targets)


def test_fault_counts(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    predictions, targets = case
    counts = [0] * 5
    for column, target in zip(predictions.t().tolist(), targets.tolist(), strict=True):
        counts[sum(p != target for p in column)] += 1
    assert fault_counts(predictions, targets) == counts
    assert sum(fault_counts(predictions, targets)) == 200


def test_double_fault_is_the_mean_over_pairs(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    predictions, targets = case
    wrong = (predictions != targets).numpy()
    pairs = [np.mean(wrong[i] & wrong[j]) for i, j in itertools.combinations(range(4), 2)]
    assert double_fault(predictions, targets) == pytest.approx(np.mean(pairs), rel=1e-12)


def test_identical_networks_err_together() -> None:
    predictions, targets = torch.tensor([[0, 1, 1]]).repeat(4, 1), torch.tensor([0, 1, 0])
    assert fault_counts(predictions, targets) == [2, 0, 0, 0, 1]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"expected \(networks, examples\)"):
        fault_counts(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="two networks or more"):
        double_fault(torch.zeros(1, 3), torch.zeros(3))
    with pytest.raises(ValueError, match="is empty"):
        fault_counts(torch.zeros(0, 3), torch.zeros(3))
