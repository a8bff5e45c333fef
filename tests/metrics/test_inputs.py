"""Every classification metric refuses bad predictions in one sentence that says what to do."""

import numpy as np
import pytest
import torch

from torchbayes import metrics

GOOD = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
LABELS = torch.tensor([0, 1])

EVERY = [
    metrics.accuracy,
    metrics.top_k_accuracy,
    metrics.nll,
    metrics.brier,
    metrics.ece,
    metrics.mce,
    metrics.reliability_curve,
    metrics.auroc_misclassification,
    metrics.classification_scores,
]


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize(
    ("probs", "targets", "message"),
    [
        (torch.tensor([[3.0, -1.0], [0.2, 0.8]]), LABELS, "row 0 of probs sums to 2.*softmax"),
        (GOOD.log(), LABELS, "if these are logits, apply softmax first"),
        (torch.tensor([[0.5, 0.49], [0.5, 0.5]]), LABELS, "sums to 0.99"),
        (torch.tensor([[0.5, 0.5], [torch.inf, -torch.inf]]), LABELS, "row 1 of probs sums to nan"),
        (torch.tensor([[1.2, -0.2], [0.5, 0.5]]), LABELS, "negative value -0.2"),
        (torch.tensor([[torch.nan, 0.5], [0.5, 0.5]]), LABELS, "probs contains NaN"),
        (torch.tensor([0.9, 0.7]), LABELS, r"shape \(N, C\).*1 - p and p"),
        (torch.ones(2, 1), LABELS, "C >= 2"),
        (torch.ones(0, 2), torch.ones(0).long(), "at least one row"),
        (GOOD, torch.tensor([0, 1, 1]), r"targets has shape \(3,\), expected \(2,\)"),
        (GOOD, torch.eye(2).long(), r"targets has shape \(2, 2\)"),
        (GOOD, torch.tensor([0, 2]), "label 2, expected labels 0 to 1"),
        (GOOD, torch.tensor([-1, 0]), "label -1"),
    ],
)
def test_value_errors(metric, probs, targets, message):
    with pytest.raises(ValueError, match=message) as caught:
        metric(probs, targets)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize(
    ("probs", "targets", "message"),
    [
        (np.array([[0.9, 0.1]]), LABELS, "probs must be a torch.Tensor, got ndarray"),
        (GOOD, [0, 1], "targets must be a torch.Tensor, got list"),
        (torch.eye(2).long(), LABELS, "probs must be floating point"),
        (GOOD, torch.tensor([0.0, 1.0]), "integer class labels"),
        (GOOD.to(torch.complex64), LABELS, "probs must be real"),
    ],
)
def test_type_errors(metric, probs, targets, message):
    with pytest.raises(TypeError, match=message):
        metric(probs, targets)


@pytest.mark.parametrize("metric", [metrics.auroc, metrics.aupr, metrics.fpr95, metrics.roc_curve])
def test_scores_are_checked(metric):
    with pytest.raises(ValueError, match="scores_negative contains NaN"):
        metric(torch.tensor([0.1, torch.nan]), torch.ones(2))
    with pytest.raises(ValueError, match="scores_positive must have shape"):
        metric(torch.ones(2), torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
        metric([0.1], torch.ones(2))


def test_sum_within_a_thousandth_is_accepted():
    assert metrics.accuracy(torch.tensor([[0.9, 0.1009]]), torch.tensor([0])) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_softmax_outputs_are_accepted(dtype):
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(20_000, 100, generator=generator)).softmax(dim=1).to(dtype)
    deviation = (probs.double().sum(dim=1) - 1).abs().max()
    # The reason for a tolerance that knows the dtype: bfloat16 rows miss 1 by more than 1e-3.
    assert bool(deviation > 1e-3) == (dtype == torch.bfloat16)
    metrics.ece(probs, torch.zeros(20_000, dtype=torch.int64))
