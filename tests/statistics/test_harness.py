"""The harness itself: it passes what is exact and fails what is scaled for the wrong train size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torchbayes as tb

from .targets import GaussianTarget, LinearRegression, check_moments, draws_of

PROBLEM = LinearRegression.make()


def gaussian(scale: float = 1.0) -> tb.LowRankGaussian:
    """The exact posterior: a covariance is a low-rank matrix of full rank."""
    root = np.linalg.cholesky(PROBLEM.covariance) * scale
    mean = {"weight": torch.from_numpy(PROBLEM.mean).view(1, -1)}
    factors = torch.from_numpy(root.T.copy()).unsqueeze(1)
    return tb.LowRankGaussian(mean, {}, {"weight": factors})


def test_exact_draws_pass() -> None:
    check_moments(draws_of(gaussian(), "weight", 4000), PROBLEM.mean, PROBLEM.covariance)


def test_ten_percent_too_wide_fails() -> None:
    with pytest.raises(AssertionError, match="covariance is"):
        check_moments(draws_of(gaussian(1.1), "weight", 4000), PROBLEM.mean, PROBLEM.covariance)


def test_a_shifted_mean_fails() -> None:
    draws = draws_of(gaussian(), "weight", 4000) + 0.2 * np.sqrt(np.diag(PROBLEM.covariance))
    with pytest.raises(AssertionError, match="mean is"):
        check_moments(draws, PROBLEM.mean, PROBLEM.covariance)


def test_predictive_equals_the_closed_form() -> None:
    """p(y | x) = N(mᵀx, xᵀΣx + σ²), by the library's regression predictive."""
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)).double()
    prediction = tb.predictive(
        PROBLEM.model.double(), gaussian(), x, 4000, PROBLEM.likelihood.double(),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    rows = x.numpy()
    epistemic = np.sqrt(np.einsum("ni,ij,nj->n", rows, PROBLEM.covariance, rows))
    error = 5 * epistemic / np.sqrt(4000)
    assert (np.abs(prediction.mean[:, 0].numpy() - rows @ PROBLEM.mean) < error).all()
    # The relative standard error of a standard deviation from n draws is 1/sqrt(2n) = 1.1 %.
    np.testing.assert_allclose(prediction.epistemic[:, 0].numpy(), epistemic, rtol=0.06)
    np.testing.assert_allclose(prediction.aleatoric[:, 0].numpy(), PROBLEM.noise_std, rtol=1e-6)
    total = np.sqrt(epistemic**2 + PROBLEM.noise_std**2)
    np.testing.assert_allclose(prediction.std[:, 0].numpy(), total, rtol=0.02)


def test_map_finds_the_posterior_mean() -> None:
    run = tb.fit(
        PROBLEM.model, (PROBLEM.inputs, PROBLEM.targets), "map", epochs=1500, batch_size=200,
        likelihood=PROBLEM.likelihood, lr=0.05, prior=PROBLEM.prior_precision,
        schedule="cosine", progress=False,
    )  # fmt: skip
    found = run.posterior.mean()["weight"].double().numpy()[0]
    np.testing.assert_allclose(found, PROBLEM.mean, atol=0.02 * PROBLEM.mean_field_std.min())


def test_the_gaussian_target_has_the_gradient_of_its_density() -> None:
    target = GaussianTarget()
    with torch.no_grad():
        target.theta += 0.3
    (gradient,) = torch.autograd.grad(target(), [target.theta])
    from scipy import stats

    density = stats.multivariate_normal(target.exact_mean, target.exact_covariance)
    point, step = target.theta.detach().numpy(), 1e-5
    numeric = [
        (density.logpdf(point - step * e) - density.logpdf(point + step * e)) / (2 * step)
        for e in np.eye(len(point))
    ]
    np.testing.assert_allclose(gradient.numpy(), numeric, rtol=1e-5)
    draws = np.random.default_rng(0).multivariate_normal(
        target.exact_mean, target.exact_covariance, size=3000
    )
    check_moments(draws, target.exact_mean, target.exact_covariance)
