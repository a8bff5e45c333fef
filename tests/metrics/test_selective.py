"""Risk-coverage curves against a transcription, enumeration of tie orders, and hand values."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbayes import metrics


def test_hand_values():
    confidence = torch.tensor([0.2, 0.9, 0.7, 0.4])
    correct = torch.tensor([False, True, False, True])
    coverage, risk = metrics.risk_coverage(confidence, correct)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 2 / 4])
    assert metrics.aurc(confidence, correct) == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4)
    best = (0 + 0 + 1 / 3 + 2 / 4) / 4
    assert metrics.excess_aurc(confidence, correct) == pytest.approx(
        (1 / 2 + 1 / 3 + 1 / 2) / 4 - best
    )


def test_agrees_with_transcription(predictions):
    probs, targets = predictions()
    confidence, correct = probs.max(1).values, probs.argmax(1) == targets
    order = np.argsort(-confidence.numpy())
    expected = [1 - correct.numpy()[order[:k]].mean() for k in range(1, len(order) + 1)]
    risk = metrics.risk_coverage(confidence, correct).risk
    torch.testing.assert_close(risk, torch.tensor(expected))


def test_ties_are_the_expectation_over_their_orders():
    confidence = torch.tensor([0.5, 0.9, 0.5, 0.5, 0.1])
    errors = [1, 0, 0, 1, 1]
    curves = []
    for tied in permutations([0, 2, 3]):
        order = [1, *tied, 4]
        curves.append(np.cumsum([errors[i] for i in order]) / np.arange(1, 6))
    risk = metrics.risk_coverage(confidence, 1 - torch.tensor(errors)).risk
    np.testing.assert_allclose(risk.numpy(), np.mean(curves, axis=0))


def test_constant_confidence_has_constant_risk():
    correct = torch.tensor([1, 0, 1, 1])
    assert metrics.risk_coverage(torch.zeros(4), correct).risk.tolist() == [0.25] * 4
    assert metrics.aurc(torch.zeros(4), correct) == 0.25


def test_perfect_order_has_no_excess():
    confidence = torch.linspace(1, 0, 50)
    assert metrics.excess_aurc(confidence, torch.arange(50) < 30) == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_properties(rows, random):
    confidence = torch.tensor([level for level, _ in rows])
    correct = torch.tensor([hit for _, hit in rows])
    coverage, risk = metrics.risk_coverage(confidence, correct)
    assert float(coverage[-1]) == 1.0
    assert float(risk[-1]) == pytest.approx(1 - float(correct.double().mean()))
    assert metrics.excess_aurc(confidence, correct) >= -1e-12
    order = torch.tensor(random.sample(range(len(rows)), len(rows)))
    torch.testing.assert_close(metrics.risk_coverage(confidence[order], correct[order]).risk, risk)


@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [
        (torch.zeros(3), torch.ones(2), "equal shapes"),
        (torch.zeros(3, 1), torch.ones(3), "one score per example"),
        (torch.zeros(0), torch.ones(0), "at least one example"),
        (torch.zeros(2), torch.tensor([0, 7]), "other than 0 and 1"),
        (torch.tensor([0.1, float("nan")]), torch.ones(2), "confidence contains NaN"),
    ],
)
def test_rejects_bad_input(confidence, correct, message):
    with pytest.raises(ValueError, match=message):
        metrics.risk_coverage(confidence, correct)
