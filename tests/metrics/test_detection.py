"""ROC, precision-recall and FPR95 against scikit-learn, hand values and properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from torchbayes import metrics


def two_groups(negatives=300, positives=200, seed=0, step=0.0):
    """Overlapping scores; ``step`` > 0 rounds them to a grid, which makes ties."""
    generator = torch.Generator().manual_seed(seed)
    negative = torch.randn(negatives, generator=generator, dtype=torch.float64)
    positive = torch.randn(positives, generator=generator, dtype=torch.float64) + 1
    if step > 0:
        negative, positive = (negative / step).round() * step, (positive / step).round() * step
    return negative, positive


def pooled(negative, positive):
    """Labels and scores as scikit-learn wants them."""
    labels = torch.cat([torch.zeros(len(negative)), torch.ones(len(positive))])
    return labels.numpy(), torch.cat([negative, positive]).numpy()


@pytest.mark.parametrize("step", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (100.0, 1.0), (0.0, 1e-12), (0.0, 1e6)])
def test_agree_with_scikit_learn(step, shift, scale):
    negative, positive = (scores * scale + shift for scores in two_groups(step=step))
    labels, scores = pooled(negative, positive)
    assert metrics.auroc(negative, positive) == pytest.approx(roc_auc_score(labels, scores))
    assert metrics.aupr(negative, positive) == pytest.approx(
        average_precision_score(labels, scores)
    )
    expected = roc_curve(labels, scores, drop_intermediate=False)
    curve = metrics.roc_curve(negative, positive)
    for ours, theirs in zip(curve, expected, strict=True):
        torch.testing.assert_close(ours, torch.from_numpy(theirs))
    fpr, tpr, _ = expected
    assert metrics.fpr95(negative, positive) == pytest.approx(fpr[tpr >= 0.95].min())


def test_hand_values():
    negative, positive = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0])
    # of six pairs 5 are in order, counting the tie (2, 2) as one half: (1.5 + 3) / 6
    assert metrics.auroc(negative, positive) == 0.75
    # thresholds 4, 3, 2: precision 1 at recall 1/2, and 2/4 at recall 1
    assert metrics.aupr(negative, positive) == pytest.approx(0.75)
    assert metrics.fpr95(negative, positive) == pytest.approx(2 / 3)


def test_fpr95_counts_exactly_ninety_five_percent():
    # 19 of 20 positives score 1 and one scores -1, so the threshold 1 reaches 95 % exactly.
    positive = torch.tensor([1.0] * 19 + [-1.0])
    assert metrics.fpr95(torch.zeros(5), positive) == 0.0
    assert metrics.fpr95(torch.zeros(5), positive[1:]) == 1.0


def test_area_is_exact_for_many_scores():
    # All positives lie above all negatives but one tie: (P N - 1/2) / (P N) survives rounding.
    n = 200_000
    area = metrics.auroc(torch.arange(n), torch.arange(n - 1, 2 * n - 1))
    assert area == 1 - 0.5 / n**2


@pytest.mark.parametrize(("negatives", "positives"), [(0, 3), (3, 0), (0, 0)])
def test_empty_group_is_nan(negatives, positives):
    groups = torch.ones(negatives), torch.ones(positives)
    assert math.isnan(metrics.auroc(*groups))
    assert math.isnan(metrics.aupr(*groups))
    assert math.isnan(metrics.fpr95(*groups))
    curve = metrics.roc_curve(*groups)
    assert bool(curve.fpr.isnan().all()) == (negatives == 0)
    assert bool(curve.tpr.isnan().all()) == (positives == 0)


def test_infinite_scores_keep_their_order():
    assert metrics.auroc(torch.tensor([-math.inf, 0.0]), torch.tensor([1.0, math.inf])) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_other_dtypes(dtype):
    negative, positive = two_groups(step=1.0)
    area = metrics.auroc(negative.to(dtype), positive.to(dtype))
    assert area == metrics.auroc(negative, positive)


def test_misclassification_agrees_with_scikit_learn(predictions):
    probs, targets = predictions()
    wrong = (probs.argmax(1) != targets).numpy()
    entropy = -(probs * probs.log()).sum(1)
    assert metrics.auroc_misclassification(probs, targets) == pytest.approx(
        roc_auc_score(wrong, 1 - probs.max(1).values)
    )
    assert metrics.auroc_misclassification(probs, targets, by_entropy=True) == pytest.approx(
        roc_auc_score(wrong, entropy)
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_misclassification_is_nan_if_all_right_or_all_wrong(shift):
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    targets = torch.tensor([0 + shift, 1 - shift])
    assert math.isnan(metrics.auroc_misclassification(probs, targets))
    assert math.isnan(metrics.auroc_misclassification(probs, targets, by_entropy=True))


scores = st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(-1e9, 1e9)), min_size=1)


@given(scores, scores)
@settings(max_examples=100, deadline=None)
def test_properties(negative, positive):
    negative = torch.tensor(negative, dtype=torch.float64)
    positive = torch.tensor(positive, dtype=torch.float64)
    area = metrics.auroc(negative, positive)
    assert metrics.auroc(-negative, -positive) == pytest.approx(1 - area, abs=1e-12)
    assert metrics.auroc(positive, negative) == pytest.approx(1 - area, abs=1e-12)
    assert metrics.auroc(negative.flip(0), positive.flip(0)) == area
    curve = metrics.roc_curve(negative, positive)
    assert float(torch.trapezoid(curve.tpr, curve.fpr)) == pytest.approx(area, abs=1e-12)
    assert bool((curve.fpr.diff() >= 0).all())
    assert bool((curve.tpr.diff() >= 0).all())
    assert 0 <= metrics.fpr95(negative, positive) <= 1
    assert 0 <= metrics.aupr(negative, positive) <= 1
