"""Averaged predictions against NumPy, and mixtures against scipy and their own samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch.distributions import Cauchy, Gamma, LogNormal, Poisson

import torchbayes as tb


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits(draws: int = 7, examples: int = 11, classes: int = 4, seed: int = 0) -> torch.Tensor:
    shape = (draws, examples, classes)
    return 2 * torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


# -- Classes ------------------------------------------------------------------------------------------


def test_probabilities_are_averaged_not_logits() -> None:
    outputs = logits()
    p = tb.Categorical().predictive(outputs)
    truth = special.softmax(outputs.numpy(), axis=2).mean(0)
    np.testing.assert_allclose(p.probs, truth, rtol=1e-12)
    wrong = special.softmax(outputs.numpy().mean(0), axis=1)
    assert np.abs(truth - wrong).max() > 0.05  # the two can be told apart
    np.testing.assert_array_equal(p.prediction, truth.argmax(1))
    np.testing.assert_allclose(p.confidence, truth.max(1))
    assert len(p) == 11
    assert p.draws == 7


def test_the_parts_of_the_entropy() -> None:
    outputs = logits()
    p = tb.Categorical().predictive(outputs)
    each = special.softmax(outputs.numpy(), axis=2)
    total = stats.entropy(each.mean(0), axis=1)
    aleatoric = stats.entropy(each, axis=2).mean(0)
    np.testing.assert_allclose(p.entropy, total, rtol=1e-12)
    np.testing.assert_allclose(p.aleatoric, aleatoric, rtol=1e-12)
    # The mutual information by its other definition: the mean KL of a draw from the average.
    information = stats.entropy(each, each.mean(0)[None], axis=2).mean(0)
    np.testing.assert_allclose(p.epistemic, information, atol=1e-12)
    np.testing.assert_allclose(p.aleatoric + p.epistemic, p.entropy, rtol=1e-12)


def test_agreeing_and_certain_draws() -> None:
    agreed = tb.Categorical().predictive(logits(1).expand(5, -1, -1).float())
    assert agreed.epistemic.max() < 1e-6
    assert agreed.epistemic.min() >= 0
    # Two certain draws that disagree: all of the entropy is about the weights.
    certain = tb.Categorical().predictive(torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]]))
    assert certain.aleatoric.item() == 0
    assert certain.epistemic.item() == pytest.approx(np.log(2))
    assert torch.isfinite(certain.entropy).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_outputs_give_single_precision_probabilities(dtype: torch.dtype) -> None:
    p = tb.Categorical().predictive(logits().to(dtype))
    assert p.probs.dtype == torch.float32
    np.testing.assert_allclose(p.probs.sum(1), 1, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_log_probability_of_labels(dtype: torch.dtype) -> None:
    p = tb.Categorical().predictive(logits())
    labels = torch.arange(11) % 4
    truth = np.log(p.probs.numpy()[np.arange(11), labels])
    np.testing.assert_allclose(p.log_prob(labels.to(dtype)), truth)


@pytest.mark.parametrize("sizes", [(1, 2, 4), (5, 1, 1), (3, 3, 1)])
def test_merging_is_associative_and_weighs_draws(sizes: tuple[int, ...]) -> None:
    outputs = logits()
    likelihood = tb.Categorical()
    whole = likelihood.predictive(outputs)
    a, b, c = (likelihood.predictive(part) for part in outputs.split(sizes))
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b)):
        assert merged.draws == 7
        np.testing.assert_allclose(merged.probs, whole.probs, rtol=1e-12)
        np.testing.assert_allclose(merged.aleatoric, whole.aleatoric, rtol=1e-12)


def test_joining_examples_and_merging_draws_commute() -> None:
    outputs = logits()
    for likelihood in (tb.Categorical(), tb.GaussianNoise(0.5)):
        whole = likelihood.predictive(outputs)
        kind = type(whole)
        rows = outputs.split([4, 6, 1], dim=1)
        one = kind.cat(
            [likelihood.predictive(r[:3]).merge(likelihood.predictive(r[3:])) for r in rows]
        )
        two = kind.cat([likelihood.predictive(r[:3]) for r in rows]).merge(
            kind.cat([likelihood.predictive(r[3:]) for r in rows])
        )
        for joined in (one, two):
            assert joined.draws == 7
            assert len(joined) == 11
            for part in ("prediction", "aleatoric", "epistemic"):
                torch.testing.assert_close(getattr(joined, part), getattr(whole, part))


def test_predictions_that_do_not_belong_together() -> None:
    classes, numbers = tb.Categorical(), tb.GaussianNoise()
    five, seven = classes.predictive(logits(5)), classes.predictive(logits(7))
    other = numbers.predictive(logits(5))
    for wrong in (classes.predictive(logits(5, examples=1)), other):
        with pytest.raises(ValueError, match="cannot merge"):
            five.merge(wrong)
    with pytest.raises(ValueError, match="cannot merge"):
        other.merge(numbers.predictive(logits(5, examples=1)))
    with pytest.raises(ValueError, match="cannot merge"):
        other.merge(five)
    for parts in ([five, seven], [five, other], []):
        with pytest.raises(ValueError, match="cannot join"):
            tb.ClassPredictive.cat(parts)
    with pytest.raises(ValueError, match="cannot join"):
        tb.RegressionPredictive.cat([other, numbers.predictive(logits(7))])


# -- Numbers ------------------------------------------------------------------------------------------


def mixture() -> tuple[tb.RegressionPredictive, np.ndarray, np.ndarray]:
    """Five draws for three examples with two outputs each, the noise predicted."""
    outputs = torch.randn(5, 3, 4, generator=seeded(1), dtype=torch.float64)
    p = tb.GaussianNoise(predicted=True).predictive(outputs)
    return p, outputs[..., :2].numpy(), np.exp(outputs[..., 2:].numpy())


def test_mean_and_both_parts_of_the_spread() -> None:
    p, means, stds = mixture()
    np.testing.assert_allclose(p.means, means)
    np.testing.assert_allclose(p.stds, stds)
    np.testing.assert_allclose(p.mean, means.mean(0))
    assert torch.equal(p.prediction, p.mean)
    np.testing.assert_allclose(p.epistemic, means.std(0))
    np.testing.assert_allclose(p.aleatoric, np.sqrt((stds**2).mean(0)))
    # The law of total variance, and the second moment of a mixture.
    second = (means**2 + stds**2).mean(0)
    np.testing.assert_allclose(p.std, np.sqrt(second - means.mean(0) ** 2), rtol=1e-10)


def test_one_draw_has_no_doubt_about_the_weights() -> None:
    p = tb.GaussianNoise(0.5).predictive(torch.zeros(1, 3, 1))
    assert torch.equal(p.epistemic, torch.zeros(3, 1))
    torch.testing.assert_close(p.std, torch.full((3, 1), 0.5))
    torch.testing.assert_close(p.quantile(0.5), torch.zeros(3, 1))


def test_log_density_of_the_mixture() -> None:
    p, means, stds = mixture()
    targets = torch.randn(3, 2, generator=seeded(2), dtype=torch.float64)
    each = stats.norm(means, stds).logpdf(targets.numpy()).sum(2)
    truth = special.logsumexp(each, axis=0) - np.log(5)
    np.testing.assert_allclose(p.log_prob(targets), truth, rtol=1e-12)
    assert p.log_prob(1000 * targets).isfinite().all()  # where every density underflows


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_log_density_of_single_outputs(shape: tuple[int, ...]) -> None:
    outputs = torch.randn(4, *shape, generator=seeded(), dtype=torch.float64)
    p = tb.GaussianNoise(0.5).predictive(outputs)
    targets = torch.randn(6, generator=seeded(1), dtype=torch.float64)
    density = stats.norm(outputs.reshape(4, 6), 0.5).pdf(targets).mean(0)
    for column in (targets, targets[:, None]):
        value = p.log_prob(column)
        assert value.shape == (6,)  # one number per example, never (6, 6)
        np.testing.assert_allclose(value, np.log(density), rtol=1e-6)


@pytest.mark.parametrize("q", [0.001, 0.05, 0.5, 0.9, 0.999])
def test_quantiles_of_the_mixture(q: float) -> None:
    p, means, stds = mixture()
    ours = p.quantile(q).numpy()
    for example in range(3):
        for output in range(2):
            parts = stats.norm(means[:, example, output], stds[:, example, output])

            def cdf(x: float, parts: stats.rv_continuous = parts) -> float:
                return float(parts.cdf(x).mean()) - q

            truth = optimize.brentq(cdf, -500, 500, xtol=1e-12)
            tolerance = 1e-6 * float(p.std[example, output])
            assert ours[example, output] == pytest.approx(truth, abs=tolerance)


def test_quantiles_of_samples() -> None:
    p, means, stds = mixture()
    rng = np.random.default_rng(0)
    count = 40_000
    which = rng.integers(5, size=count)
    samples = rng.normal(means[which, 0, 0], stds[which, 0, 0])
    for q in (0.1, 0.5, 0.95):
        share = (samples < float(p.quantile(q)[0, 0])).mean()
        assert abs(share - q) < 4 * np.sqrt(q * (1 - q) / count)


def test_quantiles_far_apart_and_in_single_precision() -> None:
    """One example's draws are 1e6 of its noise apart, the other's agree."""
    outputs = torch.tensor([[[0.0], [5.0]], [[1e4], [5.0]]])
    p = tb.GaussianNoise(0.01).predictive(outputs)
    low, high = p.quantile(0.25), p.quantile(0.75)
    assert low[0].item() == pytest.approx(0.0, abs=0.01)
    assert high[0].item() == pytest.approx(1e4, abs=0.01)
    truth = stats.norm(5, 0.01).ppf(0.25)
    assert low[1].item() == pytest.approx(truth, abs=1e-5)


def test_quantiles_of_skewed_and_heavy_tailed_noise() -> None:
    outputs = torch.tensor([[[0.0]], [[1.0]]], dtype=torch.float64)
    skewed = tb.likelihood.Observation(lambda out: LogNormal(out, 0.5)).predictive(outputs)
    heavy = tb.likelihood.Observation(lambda out: Cauchy(out, 0.5)).predictive(
        outputs
    )  # has no std
    for p, parts in (
        (skewed, stats.lognorm(0.5, scale=np.exp([0.0, 1.0]))),
        (heavy, stats.cauchy([0.0, 1.0], 0.5)),
    ):
        for q in (0.1, 0.7):
            assert parts.cdf(p.quantile(q).item()).mean() == pytest.approx(q, abs=1e-5)


def test_quantiles_that_do_not_exist() -> None:
    p, _, _ = mixture()
    for q in (0.0, 1.0, -0.1, 95.0, float("nan")):
        with pytest.raises(ValueError, match="expected a probability strictly between 0 and 1"):
            p.quantile(q)
    waits = tb.likelihood.Observation(lambda out: Gamma(out.exp(), 1.0)).predictive(
        torch.zeros(2, 3, 1)
    )
    with pytest.raises(TypeError, match="Gamma has no quantile function"):
        waits.quantile(0.5)


def test_counts_have_a_mean_and_a_spread() -> None:
    rates = torch.tensor([[[1.0]], [[4.0]]], dtype=torch.float64)
    p = tb.likelihood.Observation(lambda out: Poisson(out)).predictive(rates)
    assert p.mean.item() == 2.5
    assert p.std.item() == pytest.approx(np.sqrt(2.5 + 1.5**2))
    truth = np.log(stats.poisson([1.0, 4.0]).pmf(3).mean())
    assert p.log_prob(torch.tensor([3])).item() == pytest.approx(truth)


@pytest.mark.parametrize("q", [[0.1, 0.9], torch.tensor([0.1, 0.9]), "half"])
def test_a_quantile_is_asked_for_one_probability(q: Any) -> None:
    p = tb.GaussianNoise().predictive(torch.zeros(2, 3, 1))
    with pytest.raises(TypeError, match="expected one probability"):
        p.quantile(q)
    assert torch.equal(p.quantile(torch.tensor(0.5)), p.quantile(0.5))
