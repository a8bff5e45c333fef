"""Regression scores against SciPy, numerical integration, scikit-learn and hand values."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.metrics import root_mean_squared_error

from torchbayes import metrics


def mixtures(draws=4, shape=(6,), seed=0):
    """Random component means and stds (draws, *shape) and targets (*shape)."""
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(draws, *shape, generator=generator, dtype=torch.float64)
    stds = 0.2 + torch.rand(draws, *shape, generator=generator, dtype=torch.float64)
    targets = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return means, stds, targets


def cdf(x, means, stds):
    """Distribution function of one mixture at one point."""
    return stats.norm.cdf(x, means, stds).mean()


def crps_by_integration(means, stds, y):
    """Integral of (F(x) - 1{x >= y})^2, in pieces that end at the step and in the tails."""
    low, high = (means - 10 * stds).min(), (means + 10 * stds).max()
    left, _ = integrate.quad(
        lambda x: cdf(x, means, stds) ** 2, min(low, y), y, limit=500, epsabs=1e-10
    )
    right, _ = integrate.quad(
        lambda x: (cdf(x, means, stds) - 1) ** 2, y, max(high, y), limit=500, epsabs=1e-10
    )
    return left + right


@pytest.mark.parametrize("draws", [1, 2, 5])
def test_crps_agrees_with_numerical_integration(draws):
    means, stds, targets = mixtures(draws)
    expected = [
        crps_by_integration(means[:, i].numpy(), stds[:, i].numpy(), float(targets[i]))
        for i in range(6)
    ]
    assert metrics.gaussian_mixture_crps(means, stds, targets) == pytest.approx(
        np.mean(expected), abs=1e-8
    )


def test_gaussian_crps_is_the_textbook_form():
    mean, std, targets = mixtures(1)
    mean, std = mean[0], std[0]
    z = ((targets - mean) / std).numpy()
    expected = std.numpy() * (
        z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi)
    )
    assert metrics.gaussian_crps(mean, std, targets) == pytest.approx(expected.mean())
    assert metrics.gaussian_crps(mean, std[:1], targets) == metrics.gaussian_crps(
        mean, std[:1].expand(6), targets
    )
    assert metrics.gaussian_crps(mean, std[0], targets) == metrics.gaussian_crps(
        mean, std[:1], targets
    )


def test_repeated_component_changes_nothing():
    means, stds, targets = mixtures(1)
    assert metrics.gaussian_mixture_crps(
        means.repeat(3, 1), stds.repeat(3, 1), targets
    ) == pytest.approx(metrics.gaussian_mixture_crps(means, stds, targets))


def test_crps_of_points_is_that_of_the_ensemble():
    means, _, targets = mixtures(5)
    draws, y = means.numpy(), targets.numpy()
    expected = np.abs(draws - y).mean(0) - 0.5 * np.abs(draws[:, None] - draws).mean((0, 1))
    zero = torch.zeros((), dtype=torch.float64)
    assert metrics.gaussian_mixture_crps(means, zero, targets) == pytest.approx(expected.mean())
    assert metrics.gaussian_crps(targets, zero, targets) == 0.0
    assert metrics.gaussian_crps(targets + 2, zero, targets) == pytest.approx(2.0)


def test_crps_survives_extreme_scales():
    assert metrics.gaussian_crps(
        torch.tensor([1e8]), torch.tensor([1e-8]), torch.tensor([0.0])
    ) == pytest.approx(1e8)


@pytest.mark.parametrize("shape", [(6,), (6, 2)])
def test_nll_agrees_with_scipy(shape):
    means, stds, targets = mixtures(4, shape)
    density = stats.norm.pdf(targets.numpy(), means.numpy(), stds.numpy()).mean(0)
    assert metrics.gaussian_mixture_nll(means, stds, targets) == pytest.approx(
        -np.log(density).mean()
    )


def test_nll_far_in_the_tail_stays_finite():
    value = metrics.gaussian_mixture_nll(
        torch.zeros(2, 1), torch.tensor(1.0), torch.tensor([100.0])
    )
    assert value == pytest.approx(5000 + 0.5 * math.log(2 * math.pi))


def test_rmse_agrees_with_scikit_learn():
    means, _, targets = mixtures(1, (50, 3))
    assert metrics.rmse(means[0], targets) == pytest.approx(
        root_mean_squared_error(targets.flatten().numpy(), means[0].flatten().numpy())
    )


@pytest.mark.parametrize("q", [0.025, 0.3, 0.5, 0.975])
@pytest.mark.parametrize("draws", [1, 4])
def test_quantile_inverts_the_distribution_function(q, draws):
    means, stds, _ = mixtures(draws)
    quantile = metrics.gaussian_mixture_quantile(means, stds, q)
    reached = stats.norm.cdf(quantile.numpy(), means.numpy(), stds.numpy()).mean(0)
    np.testing.assert_allclose(reached, q, atol=1e-10)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, float("nan")])
def test_quantile_rejects_impossible_probability(q):
    with pytest.raises(ValueError, match="strictly between"):
        metrics.gaussian_mixture_quantile(torch.zeros(1, 1), torch.ones(1, 1), q)


def test_interval_hand_values():
    lower, upper = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 2.0, 4.0])
    targets = torch.tensor([0.0, 1.0, 2.5, -0.1])
    assert metrics.interval_coverage(lower, upper, targets) == 0.5
    assert metrics.interval_width(lower, upper) == 2.0


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]
)
def test_low_precision_is_close(dtype, digits):
    exact = metrics.regression_scores(*mixtures(3, (200,)))
    rounded = metrics.regression_scores(*(t.to(dtype) for t in mixtures(3, (200,))))
    for key in ("rmse", "nll", "crps", "width95"):
        assert rounded[key] == pytest.approx(exact[key], rel=digits), key


@pytest.mark.parametrize(
    ("means", "stds", "targets", "message"),
    [
        (torch.zeros(2, 5), torch.ones(2, 5), torch.zeros(5, 1), "expected equal shapes"),
        (torch.zeros(2, 5), torch.ones(2, 4), torch.zeros(5), "broadcasts to that of means"),
        (torch.zeros(2, 5), torch.ones(3, 2, 5), torch.zeros(5), "broadcasts to that of means"),
        (torch.zeros(2, 5), -torch.ones(2, 5), torch.zeros(5), "negative value -1"),
        (torch.zeros(2, 5), torch.zeros(2, 5), torch.zeros(5), "stds contains 0"),
        (torch.zeros(2, 5), torch.full((2, 5), torch.inf), torch.zeros(5), "infinite"),
        (torch.full((2, 5), torch.nan), torch.ones(2, 5), torch.zeros(5), "means contains NaN"),
        (torch.zeros(2, 5), torch.ones(2, 5), torch.full((5,), torch.nan), "targets contains NaN"),
        (torch.zeros(2, 0), torch.ones(2, 1), torch.zeros(0), "at least one number"),
        (torch.tensor(0.0), torch.tensor(1.0), torch.zeros(1), "is a scalar"),
    ],
)
def test_rejects_bad_input(means, stds, targets, message):
    with pytest.raises(ValueError, match=message):
        metrics.regression_scores(means, stds, targets)


def test_rejects_crossed_and_ragged_intervals():
    with pytest.raises(ValueError, match="lower exceeds upper"):
        metrics.interval_width(torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match="equal shapes"):
        metrics.interval_coverage(torch.zeros(2), torch.ones(2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="equal shapes"):
        metrics.rmse(torch.zeros(2), torch.zeros(2, 1))
