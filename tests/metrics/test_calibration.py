"""Calibration errors against a literal transcription, torchmetrics, hand values and properties."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_calibration_error

from torchbayes import metrics


def binary(confidences, hits, dtype=torch.float64):
    """Two-class predictions of class 1 with the given confidences, right where ``hits``."""
    level = torch.tensor(confidences, dtype=dtype)
    return torch.stack([1 - level, level], dim=1), torch.tensor(hits, dtype=torch.int64)


def textbook(probs, targets, bins):
    """Gap and weight of each equal-width bin (Guo et al. 2017, eqs. 2 to 5), row by row."""
    level, hit = probs.max(1).values.numpy(), (probs.argmax(1) == targets).numpy()
    gaps, weights = [], []
    for i in range(bins):
        inside = (level > i / bins) & (level <= (i + 1) / bins)
        if inside.any():
            gaps.append(abs(hit[inside].mean() - level[inside].mean()))
            weights.append(inside.mean())
    return np.array(gaps), np.array(weights)


def quantile_bins(probs, targets, bins):
    """The same for bins of equal count, by splitting the sorted rows."""
    level, hit = probs.max(1).values.numpy(), (probs.argmax(1) == targets).numpy()
    chunks = np.array_split(np.argsort(level), bins)
    gaps = [abs(hit[chunk].mean() - level[chunk].mean()) for chunk in chunks]
    return np.array(gaps), np.array([len(chunk) / len(level) for chunk in chunks])


@pytest.mark.parametrize("bins", [1, 8, 10, 15, 20])
@pytest.mark.parametrize(("equal_mass", "reference"), [(False, textbook), (True, quantile_bins)])
def test_agrees_with_transcription(predictions, bins, equal_mass, reference):
    probs, targets = predictions(n=517)
    gaps, weights = reference(probs, targets, bins)
    assert metrics.ece(probs, targets, bins, equal_mass) == pytest.approx(gaps @ weights)
    assert metrics.mce(probs, targets, bins, equal_mass) == pytest.approx(gaps.max())


def test_agrees_with_torchmetrics_below_confidence_one(predictions):
    probs, targets = predictions(n=2000)
    for norm, ours in (("l1", metrics.ece), ("max", metrics.mce)):
        theirs = multiclass_calibration_error(probs, targets, 7, n_bins=15, norm=norm)
        assert ours(probs, targets) == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_confidence_one_shares_the_last_bin(dtype):
    probs, targets = binary([0.95, 1.0], [1, 0], dtype)
    assert metrics.ece(probs, targets, bins=10) == pytest.approx(0.475, abs=1e-3)
    assert metrics.reliability_curve(probs, targets, bins=10).count.tolist() == [0] * 9 + [2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_confidence_on_an_edge_is_in_the_bin_below(dtype):
    probs, targets = binary([0.6, 0.7, 0.8, 0.9], [1, 1, 1, 1], dtype)
    count = metrics.reliability_curve(probs, targets, bins=10).count
    assert count.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0]


def test_hand_value_of_curve():
    probs, targets = binary([0.55, 0.65, 0.95, 0.85], [1, 0, 1, 1])
    curve = metrics.reliability_curve(probs, targets, bins=4)
    assert curve.edges.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert curve.count.tolist() == [0, 0, 2, 2]
    assert curve.confidence[2:].tolist() == pytest.approx([0.6, 0.9])
    assert curve.accuracy[2:].tolist() == [0.5, 1.0]
    assert curve.confidence[:2].isnan().all()
    assert curve.accuracy[:2].isnan().all()
    assert metrics.ece(probs, targets, bins=4) == pytest.approx(0.1)
    assert metrics.mce(probs, targets, bins=4) == pytest.approx(0.1)


def test_equal_mass_bins_hold_equal_counts(predictions):
    curve = metrics.reliability_curve(*predictions(n=403), bins=8, equal_mass=True)
    assert curve.count.tolist() == [51, 51, 51, 50, 50, 50, 50, 50]
    assert bool((curve.edges.diff() > 0).all())
    assert bool((curve.confidence > curve.edges[:-1]).all())
    assert bool((curve.confidence <= curve.edges[1:]).all())


def test_equal_mass_never_splits_ties():
    probs, targets = binary([0.6, 1.0, 1.0, 1.0, 1.0, 1.0], [1, 0, 1, 0, 1, 1])
    curve = metrics.reliability_curve(probs, targets, bins=3, equal_mass=True)
    assert curve.count.tolist() == [6, 0, 0]
    curve = metrics.reliability_curve(probs, targets, bins=6, equal_mass=True)
    assert curve.count.tolist() == [1, 5, 0, 0, 0, 0]
    assert metrics.ece(probs, targets, 6, equal_mass=True) == pytest.approx((0.4 + 5 * 0.4) / 6)


def test_more_equal_mass_bins_than_rows():
    probs, targets = binary([0.6, 0.8], [1, 0])
    curve = metrics.reliability_curve(probs, targets, bins=5, equal_mass=True)
    assert curve.count.tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("equal_mass", [False, True])
def test_calibrated_predictions_score_near_zero(predictions, equal_mass):
    n, bins = 40_000, 15
    # E|gap| of a bin with n_b rows is at most 0.5 / sqrt(n_b), so E[ECE] <= 0.5 sqrt(bins / n); its
    # standard deviation is at most 0.5 / sqrt(n).
    bound = 0.5 * math.sqrt(bins / n) + 4 * 0.5 / math.sqrt(n)
    probs, targets = predictions(n=n)
    assert metrics.ece(probs, targets, bins, equal_mass) < bound
    sharpened = probs.pow(3) / probs.pow(3).sum(1, keepdim=True)
    assert metrics.ece(sharpened, targets, bins, equal_mass) > 5 * bound


@pytest.mark.parametrize("bins", [0, -3])
def test_rejects_too_few_bins(predictions, bins):
    with pytest.raises(ValueError, match="at least 1"):
        metrics.ece(*predictions(), bins=bins)


# Confidences of class 1 that include both ends, the middle, and ties; class 0 wins below one half.
levels = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
rows = st.lists(st.tuples(levels, st.integers(0, 1)), min_size=1, max_size=40)


@given(rows, st.integers(1, 20), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_properties(rows, bins, equal_mass, random):
    probs, targets = binary([p for p, _ in rows], [y for _, y in rows])
    curve = metrics.reliability_curve(probs, targets, bins, equal_mass)
    assert int(curve.count.sum()) == len(rows)
    error = metrics.ece(probs, targets, bins, equal_mass)
    worst = metrics.mce(probs, targets, bins, equal_mass)
    assert 0 <= error <= worst + 1e-12 <= 1 + 1e-12
    order = torch.tensor(random.sample(range(len(rows)), len(rows)))
    shuffled = metrics.ece(probs[order], targets[order], bins, equal_mass)
    assert shuffled == pytest.approx(error, abs=1e-12)


def test_a_million_rows_take_no_loop_over_rows(predictions):
    probs, targets = predictions(n=1_000_000, classes=10, dtype=torch.float32)
    start = time.perf_counter()
    metrics.ece(probs, targets)
    metrics.ece(probs, targets, equal_mass=True)
    # Both take about 0.5 s on one core; a Python loop over rows takes tens of seconds.
    assert time.perf_counter() - start < 6
