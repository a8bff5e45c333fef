"""Post-hoc helpers against scikit-learn, SciPy, and what their theorems promise on held-out data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import torchbayes as tb
from torchbayes.posthoc.abstain import risk_bound
from torchbayes.posthoc.conformal import conformal_threshold


def made_up(
    count: int, seed: int, temperature: float = 1.0, scale: float = 2.5
) -> tuple[tb.ClassPredictive, Tensor]:
    """Labels drawn from softmax(z), predictions softmax(z / temperature): 1/temperature puts them right."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(count, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    probs = (logits / temperature).softmax(1)
    return tb.ClassPredictive(probs, torch.special.entr(probs).sum(1) / 2, 8), labels


def test_temperature_is_scikit_learns() -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    if not hasattr(calibration, "_TemperatureScaling"):
        pytest.skip("this scikit-learn has no temperature scaling")
    p, labels = made_up(2000, 0, temperature=0.5)
    theirs = calibration._TemperatureScaling().fit(p.probs.log().numpy(), labels.numpy())
    scaling = tb.posthoc.temperature_scaling(p, labels)
    assert scaling.temperature == pytest.approx(1 / theirs.beta_, rel=1e-3)
    np.testing.assert_allclose(
        scaling(p).probs, theirs.predict(p.probs.log().numpy()), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_temperature_finds_the_one_that_made_the_labels(temperature: float) -> None:
    p, labels = made_up(20_000, 1, temperature)
    found = tb.posthoc.temperature_scaling(p, labels).temperature
    # The Fisher information of log T is about 0.6 an example here: a standard error of 0.9 %.
    assert found == pytest.approx(1 / temperature, rel=0.04)


def test_temperature_keeps_classes_and_the_share_of_aleatoric_entropy() -> None:
    p, labels = made_up(500, 2, temperature=0.5)
    scaled = tb.posthoc.temperature_scaling(p, labels)(p)
    assert torch.equal(scaled.prediction, p.prediction)
    assert scaled.draws == p.draws
    torch.testing.assert_close(scaled.aleatoric / scaled.entropy, p.aleatoric / p.entropy)


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_conformal_sets_cover_held_out_data_as_often_as_asked(coverage: float) -> None:
    """Badly over-confident predictions; coverage is Beta-binomial around k/(n + 1)."""
    fitted, labels = made_up(2000, 3, temperature=0.3)
    fresh, truth = made_up(4000, 4, temperature=0.3)
    sets = tb.posthoc.conformal_sets(fitted, labels, coverage)(fresh)
    covered = float(sets.gather(1, truth.unsqueeze(1)).double().mean())
    error = math.sqrt(coverage * (1 - coverage) * (1 / 2000 + 1 / 4000))
    assert abs(covered - coverage) < 3 * error
    top = torch.zeros_like(sets).scatter_(1, fresh.prediction.unsqueeze(1), True)
    assert bool(
        (sets | ~top | ~sets.any(1, keepdim=True)).all()
    )  # a set has the top class or nothing


def test_conformal_threshold_is_the_order_statistic() -> None:
    scores = torch.tensor([0.5, 0.1, 0.3, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9], dtype=torch.float64)
    assert conformal_threshold(scores, 0.9) == 0.9  # ⌈10 · 0.9⌉ = 9
    assert conformal_threshold(scores, 0.5) == 0.5
    assert conformal_threshold(scores, 0.95) == math.inf  # nine examples cannot promise 95 %


def test_risk_bound_is_clopper_pearsons() -> None:
    for errors, answered in ((0, 50), (3, 100), (99, 100)):
        exact = stats.binomtest(errors, answered, alternative="less").proportion_ci(0.99).high
        assert risk_bound(errors, answered, 0.01) == pytest.approx(exact, rel=1e-9)
    assert risk_bound(5, 5, 0.01) == 1.0


def test_abstention_keeps_the_risk_with_the_probability_promised() -> None:
    """Over 200 calibration sets the risk of all new examples is above the target at most 5 % of the time."""
    population, truth = made_up(50_000, 5, scale=6.0)
    wrong = population.prediction != truth
    broken, coverages = 0, []
    for seed in range(200):
        p, labels = made_up(1000, 100 + seed, scale=6.0)
        rule = tb.posthoc.abstain(p, labels, risk=0.1)
        answered = rule(population)
        broken += int(wrong[answered].double().mean() > 0.1)
        coverages.append(rule.coverage)
        assert rule.bound <= 0.1
    # At a rate of 5 %, 20 of 200 would be more than three standard deviations too many.
    assert broken < 20
    assert 0.5 < np.mean(coverages) < 0.99  # it answers, and not everything


def test_abstention_answers_nothing_where_nothing_can_be_promised() -> None:
    p, labels = made_up(30, 6)
    rule = tb.posthoc.abstain(p, labels, risk=0.001)
    assert rule.threshold == math.inf
    assert not bool(rule(p).any())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p, y: tb.posthoc.conformal_sets(p, y, 1.0), "coverage is 1"),
        (lambda p, y: tb.posthoc.abstain(p, y, risk=0.0), "risk is 0"),
        (lambda p, y: tb.posthoc.temperature_scaling(p, y[:3]), "3,"),
        (lambda p, y: tb.posthoc.temperature_scaling(p, y + 5), "labels of the 5 classes"),
        (lambda p, y: tb.posthoc.conformal_sets(p, y.double()), "labels of the 5 classes"),
    ],
)
def test_bad_input_is_named(call, match: str) -> None:  # type: ignore[no-untyped-def]
    p, labels = made_up(10, 7)
    with pytest.raises(ValueError, match=match):
        call(p, labels)


def test_a_regression_is_refused() -> None:
    p = tb.RegressionPredictive(torch.zeros(2, 3, 1), tb.GaussianNoise().distribution)
    with pytest.raises(TypeError, match="RegressionPredictive"):
        tb.posthoc.abstain(p, torch.zeros(3, dtype=torch.int64))  # type: ignore[arg-type]
