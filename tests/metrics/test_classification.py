"""Accuracy, NLL and Brier score against scikit-learn, torchmetrics and hand values."""

import math

import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, top_k_accuracy_score
from torchmetrics.functional.classification import multiclass_accuracy

from torchbayes import metrics
from torchbayes.metrics.classification import confidence, correct, entropy


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_agree_with_scikit_learn(predictions, classes):
    probs, targets = predictions(classes=classes)
    labels = list(range(classes))
    assert metrics.accuracy(probs, targets) == accuracy_score(targets, probs.argmax(1))
    assert metrics.nll(probs, targets) == pytest.approx(log_loss(targets, probs, labels=labels))
    expected = brier_score_loss(targets.numpy(), probs.numpy(), labels=labels, scale_by_half=False)
    assert metrics.brier(probs, targets) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_top_k_agrees_with_scikit_learn_and_torchmetrics(predictions, k):
    probs, targets = predictions()
    ours = metrics.top_k_accuracy(probs, targets, k)
    assert ours == pytest.approx(
        top_k_accuracy_score(targets, probs, k=k, labels=range(7)) if k < 7 else 1.0
    )
    assert ours == pytest.approx(
        float(multiclass_accuracy(probs, targets, 7, average="micro", top_k=k))
    )


def test_ties_go_to_the_lower_class():
    probs = torch.full((10, 10), 0.1)
    targets = torch.arange(10)
    hits = [metrics.top_k_accuracy(probs[:1], targets[i : i + 1], k=5) for i in range(10)]
    assert hits == [1.0] * 5 + [0.0] * 5
    assert metrics.accuracy(probs, targets) == metrics.top_k_accuracy(probs, targets, k=1) == 0.1


@pytest.mark.parametrize("k", [0, -1, 8])
def test_top_k_rejects_impossible_k(predictions, k):
    with pytest.raises(ValueError, match="expected 1 to 7"):
        metrics.top_k_accuracy(*predictions(), k=k)


def test_hand_values():
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64)
    targets = torch.tensor([0, 1])
    assert metrics.accuracy(probs, targets) == 0.5
    assert metrics.nll(probs, targets) == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2)
    # (0.09 + 0.04 + 0.01 + 0.01 + 0.49 + 0.36) / 2
    assert metrics.brier(probs, targets) == pytest.approx(0.5)


def test_worst_brier_score_is_two():
    assert metrics.brier(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == 2.0


def test_metrics_leave_their_input_alone(predictions):
    probs, targets = predictions()
    before = probs.clone()
    metrics.classification_scores(probs, targets)
    assert torch.equal(probs, before)


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [
        (torch.float64, 708.3964185322641),
        (torch.float32, 87.33654475055310),
        (torch.float16, 87.33654475055310),
        (torch.bfloat16, 87.33654475055310),
    ],
)
def test_label_of_probability_zero_costs_the_documented_floor(dtype, floor):
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=dtype)
    assert metrics.nll(probs, torch.tensor([0, 1])) == pytest.approx(floor / 2, rel=1e-12)


def test_floor_spares_the_smallest_normal_probabilities():
    probs = torch.tensor([[1.0, 1e-300]], dtype=torch.float64)
    assert metrics.nll(probs, torch.tensor([1])) == pytest.approx(300 * math.log(10))
    half = torch.tensor([[1.0, 6e-8]], dtype=torch.float16)  # subnormal in float16
    assert metrics.nll(half, torch.tensor([1])) == pytest.approx(24 * math.log(2))


def test_perfect_nll_is_positive_zero():
    assert math.copysign(1, metrics.nll(torch.eye(3), torch.arange(3))) == 1


def test_entropy_in_nats():
    probs = torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(
        entropy(probs), torch.tensor([math.log(4), 0.0], dtype=torch.float64)
    )


def test_confidence_never_exceeds_one():
    probs = torch.tensor([[1.0005, 0.0]], dtype=torch.float64)
    assert confidence(probs).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bool])
def test_any_integer_labels(dtype):
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    assert correct(probs, torch.tensor([0, 0]).to(dtype)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
)
def test_low_precision_is_close(predictions, dtype, digits):
    probs, targets = predictions(n=2000)
    for score in (metrics.nll, metrics.brier, metrics.accuracy):
        assert score(probs.to(dtype), targets) == pytest.approx(score(probs, targets), rel=digits)


def test_gradients_are_not_tracked(predictions):
    probs, targets = predictions()
    assert metrics.nll(probs.requires_grad_(), targets) > 0
