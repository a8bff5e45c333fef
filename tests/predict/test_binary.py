"""Predictions of binary labels against NumPy and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

import torchbayes as tb


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(7, 11), (7, 11, 1), (7, 11, 4), (7, 11, 2, 3)])
def test_a_binary_prediction_is_one_of_two_classes(shape: tuple[int, ...]) -> None:
    outputs = logits(*shape)
    p = tb.Bernoulli().predictive(outputs)
    wide = shape[1:] if shape[-1] != 1 else shape[1:-1]
    each = special.expit(outputs.numpy()).reshape(7, *wide)
    probs = each.mean(0)
    np.testing.assert_allclose(p.probs, probs, rtol=1e-12)
    np.testing.assert_array_equal(p.prediction, probs > 0.5)
    np.testing.assert_allclose(p.confidence, np.maximum(probs, 1 - probs), rtol=1e-12)
    two = np.stack([1 - each, each])
    np.testing.assert_allclose(p.aleatoric, stats.entropy(two, axis=0).mean(0), rtol=1e-9)
    np.testing.assert_allclose(p.entropy, stats.entropy(two.mean(1), axis=0), rtol=1e-9)
    information = stats.entropy(two, two.mean(1, keepdims=True), axis=0).mean(0)
    np.testing.assert_allclose(p.epistemic, information, atol=1e-12)
    targets = torch.randint(2, wide, generator=seeded(3))
    truth = stats.bernoulli(probs).logpmf(targets.numpy())
    np.testing.assert_allclose(p.log_prob(targets), truth, rtol=1e-9)
    classes = p.as_classes()
    assert classes.probs.shape == (11, 2, *wide[1:])
    torch.testing.assert_close(classes.log_prob(targets), p.log_prob(targets))
    torch.testing.assert_close(classes.epistemic, p.epistemic)


def test_a_certain_prediction_that_is_wrong_has_a_finite_log_probability() -> None:
    """1 − sigmoid(30) is 0 in float32."""
    p = tb.Bernoulli().predictive(torch.tensor([[30.0]]))
    assert p.probs.item() == 1
    assert p.log_prob(torch.tensor([0])).item() == pytest.approx(-30, rel=1e-6)
    half = tb.Bernoulli().predictive(torch.tensor([[30.0]], dtype=torch.bfloat16))
    assert half.probs.dtype == torch.float32


def test_targets_that_cannot_be_have_no_probability() -> None:
    with pytest.raises(ValueError, match="other than 0 and 1"):
        tb.Bernoulli().predictive(torch.zeros(1, 2)).log_prob(torch.tensor([1, 2]))
    for wrong in (-1.0, 2.5):
        with pytest.raises(ValueError, match=f"Poisson cannot have .* {wrong:g} "):
            tb.Poisson().predictive(torch.zeros(1, 2)).log_prob(torch.tensor([wrong, 3.0]))


def test_merge_cat_and_subset() -> None:
    outputs = logits(6, 9, 3)
    whole = tb.Bernoulli().predictive(outputs)
    merged = tb.Bernoulli().predictive(outputs[:2]).merge(tb.Bernoulli().predictive(outputs[2:]))
    joined = tb.BinaryPredictive.cat(
        [tb.Bernoulli().predictive(outputs[:, :4]), tb.Bernoulli().predictive(outputs[:, 4:])]
    )
    for other in (merged, joined):
        assert other.draws == 6
        assert len(other) == 9
        torch.testing.assert_close(other.probs, whole.probs)
        torch.testing.assert_close(other.epistemic, whole.epistemic)
    index = torch.tensor([8, 0])
    torch.testing.assert_close(whole.subset(index).entropy, whole.entropy[index])
    classes = tb.Categorical().predictive(logits(6, 9, 3))
    with pytest.raises(ValueError, match="both must be of binary labels"):
        whole.merge(classes)
    with pytest.raises(ValueError, match="one kind"):
        tb.BinaryPredictive.cat([whole, classes])


def test_samples_have_the_probabilities() -> None:
    count = 20_000
    p = tb.Bernoulli().predictive(logits(5, 3, 2))
    drawn = p.sample(count, seeded())
    assert drawn.shape == (count, 3, 2)
    assert set(drawn.unique().tolist()) == {0, 1}
    error = (p.probs * (1 - p.probs) / count).sqrt()
    assert bool(((drawn.double().mean(0) - p.probs).abs() < 4 * error).all())
    torch.testing.assert_close(drawn, p.sample(count, seeded()))
    c = tb.Categorical().predictive(logits(5, 3, 4, 2))
    drawn = c.sample(count, seeded())
    assert drawn.shape == (count, 3, 2)
    share = torch.stack([(drawn == k).double().mean(0) for k in range(4)], 1)
    error = (c.probs * (1 - c.probs) / count).sqrt()
    assert bool(((share - c.probs).abs() < 4.5 * error).all())


# -- Mixtures of counts and of heavy tails ------------------------------------------------------------


@pytest.mark.parametrize("q", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_quantiles_of_counts_are_the_smallest_number_that_reaches_q(q: float) -> None:
    outputs = 2 + logits(5, 40, 2)
    p = tb.Poisson().predictive(outputs)
    value = p.quantile(q).numpy()
    rates = outputs.exp().numpy()
    assert (value == np.round(value)).all()
    assert (stats.poisson(rates).cdf(value).mean(0) >= q - 1e-9).all()
    assert (stats.poisson(rates).cdf(value - 1).mean(0) < q).all()
    single = tb.Poisson().predictive(outputs[:1]).quantile(q)
    np.testing.assert_array_equal(single, stats.poisson(rates[0]).ppf(q))
    loose = tb.likelihood.Observation(lambda out: torch.distributions.Poisson(out.exp()))
    np.testing.assert_array_equal(loose.predictive(outputs).quantile(q), value)


@pytest.mark.parametrize("q", [0.01, 0.5, 0.97])
@pytest.mark.parametrize("df", [1.5, 4.0])
def test_quantiles_of_heavy_tails_solve_scipys_cdf(q: float, df: float) -> None:
    outputs = logits(5, 20, 1)
    p = tb.StudentT(df, 0.5).double().predictive(outputs)
    value = p.quantile(q).numpy()
    below = stats.t(df, outputs.numpy(), 0.5).cdf(value).mean(0)
    np.testing.assert_allclose(below, q, atol=1e-9)
    truth = stats.t(df, outputs.numpy(), 0.5).std() if df > 2 else math.inf
    np.testing.assert_allclose(p.stds, truth, rtol=1e-6)


@pytest.mark.parametrize(
    "likelihood",
    [tb.GaussianNoise(0.3), tb.Poisson(), tb.StudentT(6.0, 0.3)],
    ids=lambda each: each._get_name(),
)
def test_new_observations_have_the_mixtures_moments(likelihood: tb.likelihood.Observation) -> None:
    count = 20_000
    p = likelihood.double().predictive(logits(4, 3, 2) / 2)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    drawn = p.sample(count, seeded())
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn.shape == (count, 3, 2)
    assert bool(((drawn.mean(0) - p.mean).abs() < 4.5 * p.std / math.sqrt(count)).all())
    torch.testing.assert_close(drawn.std(0), p.std, rtol=0.06, atol=0)
    for q in (0.2, 0.9):
        share = (drawn <= p.quantile(q)).double().mean(0)
        reached = drawn.shape[0]
        error = 4.5 * math.sqrt(q * (1 - q) / reached)
        assert bool((share > q - error).all())
    assert not torch.equal(p.sample(5), p.sample(5))


def test_the_outputs_of_an_example_come_from_the_same_draw() -> None:
    """Two draws far apart: both outputs of a new observation are of the one or of the other."""
    p = tb.GaussianNoise(0.1).predictive(torch.tensor([[[-9.0, -9.0]], [[9.0, 9.0]]]))
    drawn = p.sample(200, seeded())
    assert bool((drawn[..., 0].sign() == drawn[..., 1].sign()).all())
    assert 60 < int((drawn[..., 0] > 0).sum()) < 140
