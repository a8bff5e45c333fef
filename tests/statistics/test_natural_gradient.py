"""Conjugate linear regression: the exact mean, and the variance that each family allows.

VOGN's and K-FAC's curvature is that of squared gradients, r²x²/σ⁴ with residual r, which is the Hessian
x²/σ² where r² = σ². So the problem has every input twice, with residuals +σ and −σ: then the squares are
right at the least-squares solution, and elsewhere in the posterior up to a share of about (number of
weights)/N. IVON needs nothing of the kind.

Several outputs are as many independent regressions: their average has a smaller Monte-Carlo error.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from torchbayes.optim.ivon import IVON
from torchbayes.optim.noisy_kfac import NoisyKFAC
from torchbayes.optim.vogn import VOGN

from .targets import LinearRegression

N, SIGMA = 400, 0.5


def problem(prior_precision: float, weight: float = 1.0, seed: int = 0) -> LinearRegression:
    rng = np.random.default_rng(seed)
    mixing = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, -0.3], [0.2, 0.0, 0.7]])
    half = rng.standard_normal((N // 2, 3)) @ mixing
    x = np.vstack([half, half])
    residual = SIGMA * np.repeat([1.0, -1.0], N // 2)[:, None]
    y = x @ (weight * np.array([[1.0], [-2.0], [0.5]])) + residual
    return LinearRegression(torch.from_numpy(x), torch.from_numpy(y), SIGMA, prior_precision)


def train(
    optimizer: torch.optim.Optimizer, net: nn.Module, target: LinearRegression, steps: int
) -> np.ndarray:
    """Full-batch training with a falling rate; the mean weights averaged over the second half."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    total, count = 0.0, 0
    for t in range(steps):
        with optimizer.sampled():
            optimizer.zero_grad()
            off = net(target.inputs) - target.targets
            (0.5 * (off / SIGMA) ** 2).sum(1).mean().backward()
        optimizer.step()
        schedule.step()
        if t >= steps // 2:
            total, count = total + net.weight.detach().numpy().copy(), count + 1
    return total / count


def network(outputs: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, outputs, bias=False).double()


def exact(target: LinearRegression, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and precision of the tempered posterior, exp(−N ℓ̄/τ) N(0, 1/δ)."""
    x, y = target.inputs.numpy(), target.targets.numpy()
    precision = x.T @ x / (tau * SIGMA**2) + target.prior_precision * np.eye(3)
    return np.linalg.solve(precision, x.T @ y / (tau * SIGMA**2))[:, 0], precision


@pytest.mark.parametrize("tau", [1.0, 0.25])
@pytest.mark.parametrize("method", ["vogn", "ivon"])
def test_diagonal_methods_reach_the_best_diagonal_gaussian(method: str, tau: float) -> None:
    """The precision is the diagonal of the exact one, N h/τ + δ, under a prior as strong as the data.

    The true weights are 0, so that under such a prior the residuals stay ±σ (for VOGN) and the gradient at
    the mean stays 0 (for IVON, whose estimate of the curvature is noisier by that gradient's size).
    """
    delta = 4.0 * N
    target = problem(prior_precision=delta, weight=0.0)
    net = network(outputs=64)
    common = {
        "train_size": N, "prior": delta, "temperature": tau,
        "generator": torch.Generator().manual_seed(0),
    }  # fmt: skip
    if method == "vogn":
        optimizer: VOGN | IVON = VOGN(net, 0.02, betas=(0.9, 0.02), damping=0.0, **common)
    else:
        optimizer = IVON(net, 0.1, betas=(0.9, 0.995), initial_curvature=4.0, **common)
    mean = train(optimizer, net, target, 500 if method == "vogn" else 1500)
    exact_mean, precision = exact(target, tau)
    expected = 1 / np.sqrt(np.diag(precision))
    # The average of 64 outputs over the second half is far inside a tenth of a standard deviation.
    np.testing.assert_allclose(mean.mean(0), exact_mean, atol=0.1 * expected.min())
    found = optimizer.posterior().std()["weight"].numpy()
    # IVON: Var ĥ is about 3h², so h has a Monte-Carlo error of √(3·0.005/2) = 9 % per weight, 1 % over 64,
    # and a bias of ½·0.005·3 = 1 %. VOGN: a bias of 3/N = 1 %.
    np.testing.assert_allclose((found**2).mean(0), expected**2, rtol=0.04)


@pytest.mark.parametrize("method", ["vogn", "ivon"])
def test_diagonal_methods_find_the_mean_of_a_problem_with_signal(method: str) -> None:
    target = problem(prior_precision=2.0)
    net = network(outputs=1)
    common = {
        "train_size": N, "prior": 2.0, "generator": torch.Generator().manual_seed(0)
    }  # fmt: skip
    if method == "vogn":
        optimizer: VOGN | IVON = VOGN(net, 0.02, betas=(0.9, 0.02), damping=0.0, **common)
    else:
        optimizer = IVON(net, 0.1, betas=(0.9, 0.999), initial_curvature=4.0, **common)
    mean = train(optimizer, net, target, 1200)
    exact_mean, precision = exact(target, 1.0)
    spread = 1 / np.sqrt(np.diag(precision))
    np.testing.assert_allclose(mean[0], exact_mean, atol=0.2 * spread.min())
    if method == "vogn":
        found = optimizer.posterior().std()["weight"].numpy()[0]
        np.testing.assert_allclose(found, spread, rtol=0.04)


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_noisy_kfac_reaches_the_full_posterior(tau: float) -> None:
    """With one output G is a number, and A ⊗ G is the exact Hessian, correlations and all."""
    delta = 4e-4  # splitting the damping λ = τδ/N adds O(√λ) to the curvature: keep it small
    target = problem(prior_precision=delta)
    net = network(outputs=1)
    optimizer = NoisyKFAC(
        net, 0.05, train_size=N, prior=delta, temperature=tau, betas=(0.9, 0.02),
        damping=0.0, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    mean = train(optimizer, net, target, 800)
    exact_mean, precision = exact(target, tau)
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(mean[0], exact_mean, atol=0.2 * np.sqrt(np.diag(covariance)).min())
    posterior = optimizer.posterior()
    root = posterior._inputs["weight"].numpy() * float(posterior._outputs["weight"])
    found = root @ root.T
    # √λ = 0.001 (0.0005) on each side of a curvature of about 4, and 3/N from the spread of the weights.
    np.testing.assert_allclose(found, covariance, rtol=0.02, atol=0.02 * np.abs(covariance).max())
