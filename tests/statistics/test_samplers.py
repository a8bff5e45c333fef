"""Samplers against posteriors in closed form, with many chains at once as the rows of one parameter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchbayes.optim import ATMC, PSGLD, SGHMC, SGLD, SGNHT
from torchbayes.optim.sampler import Sampler
from torchbayes.prior import GaussianPrior

from .targets import GaussianTarget, LinearRegression, check_moments

TARGET = GaussianTarget(dimension=10, condition=100.0)
VARIANCES, AXES = np.linalg.eigh(TARGET.exact_covariance)
FLAT = GaussianPrior(precision={"theta": torch.zeros(1)})

STEP = 0.05  # the average step of the samplers with momentum: half the narrowest standard deviation
MOMENTUM = {"average_step": STEP, "momentum": 0.9}
# Thermostats that react within 0.1 / 0.05² = 40 updates.
THERMOSTATS: dict[str, tuple[type[Sampler], dict[str, Any]]] = {
    "SGNHT": (SGNHT, {"lr": 0.05, **MOMENTUM}),
    "SGNHT, one thermostat": (SGNHT, {"lr": 0.05, **MOMENTUM, "per_parameter": False}),
    "ATMC, Gaussian": (ATMC, {"lr": 0.05, **MOMENTUM, "max_step": math.inf}),
    "ATMC, relativistic": (ATMC, {"lr": 0.05, **MOMENTUM}),
}


class Chains(nn.Module):
    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.from_numpy(start).float())


def draws(
    sampler_class: type[Sampler], *, chains: int = 1000, steps: int, burn_in: int, every: int,
    noise_variance: float = 0.0, at_rest: bool = True, **options: Any,
) -> np.ndarray:  # fmt: skip
    """States of chains on the Gaussian target, with exact gradients or ones with noise added."""
    rng = np.random.default_rng(0)
    start = np.tile(TARGET.exact_mean, (chains, 1))
    if not at_rest:
        start = rng.multivariate_normal(TARGET.exact_mean, TARGET.exact_covariance, chains)
    net = Chains(start)
    theta = net.theta
    sampler = sampler_class(
        net, train_size=1, prior=FLAT, generator=torch.Generator().manual_seed(1), **options
    )
    precision, mean = TARGET._precision.float(), TARGET._mean.float()
    noise = torch.Generator().manual_seed(2)
    kept = []
    for step in range(steps):
        theta.grad = (theta.detach() - mean) @ precision
        if noise_variance > 0:
            extra = torch.randn(theta.shape, generator=noise)
            theta.grad.add_(extra, alpha=math.sqrt(noise_variance))
        sampler.step()
        if step >= burn_in and step % every == 0:
            kept.append(theta.detach().double().numpy().copy())
    return np.concatenate(kept)


def ratios(states: np.ndarray) -> np.ndarray:
    """Variance over exact variance along the target's axes, the narrowest first."""
    return ((states - TARGET.exact_mean) @ AXES).var(0) / VARIANCES


# The widest axis forgets its past at the rate `STEP²/−log(momentum)` = 0.024 per step, or lr/2 for SGLD.
# A chain of n steps is worth n·rate/2 draws of its variance.


@pytest.mark.parametrize("name", THERMOSTATS)
def test_thermostats_sample_a_gaussian(name: str) -> None:
    sampler, options = THERMOSTATS[name]
    states = draws(sampler, steps=2000, burn_in=500, every=20, **options)
    effective = 1000 * 1500 * 0.024 / 2
    check_moments(states, TARGET.exact_mean, TARGET.exact_covariance, effective=effective)
    assert np.abs(ratios(states) - 1).max() < 0.05


def test_sgld_samples_a_gaussian_at_a_small_step() -> None:
    states = draws(SGLD, steps=5000, burn_in=2000, every=50, lr=0.004)
    effective = 1000 * 3000 * 0.002 / 2
    check_moments(states, TARGET.exact_mean, TARGET.exact_covariance, effective=effective)


def test_psgld_samples_a_gaussian_when_its_average_is_slow() -> None:
    """With the usual decay of 0.99 the preconditioner follows the chain, and the term Γ is missed."""
    states = draws(PSGLD, steps=3000, burn_in=1000, every=50, at_rest=False, lr=0.03, decay=0.9999)
    # The preconditioner is about 1/√P_ii; the widest axis is no slower than with the smallest of them.
    slowest = 0.015 / math.sqrt(float(TARGET._precision.diagonal().max()))
    effective = 1000 * 2000 * slowest / 2
    check_moments(states, TARGET.exact_mean, TARGET.exact_covariance, effective=effective)


def test_sghmc_samples_a_gaussian_and_biases_are_those_of_theory() -> None:
    """Linear recursions: at curvature k the variance of SGLD has the factor 1/(1 − εk/4), and that of SGHMC
    1/(1 − s²k/(2(1 + momentum))).
    """
    sgld = ratios(draws(SGLD, steps=2000, burn_in=600, every=20, lr=0.02))
    states = draws(SGHMC, steps=2000, burn_in=500, every=20, **MOMENTUM)
    sghmc = ratios(states)
    k = 1 / VARIANCES
    # Standard errors of a variance on the widest axis, with the rates above; the others are smaller.
    error = {"sgld": math.sqrt(2 / (1000 * 1400 * 0.005)), "sghmc": math.sqrt(2 / (1500 * 12))}
    assert np.abs(sgld * (1 - 0.02 * k / 4) - 1).max() < 4 * error["sgld"]
    assert np.abs(sghmc * (1 - STEP**2 * k / (2 * 1.9)) - 1).max() < 4 * error["sghmc"]
    # The bias is on the narrow axes; at this step it is below the Monte-Carlo error of the weights.
    check_moments(states, TARGET.exact_mean, TARGET.exact_covariance, effective=1500 * 12)


NOISE = 64.0  # 80 % of the variance that SGHMC adds itself, STEP²/(2·0.1)·64


@pytest.mark.parametrize("name", THERMOSTATS)
def test_thermostats_take_out_the_gradients_noise(name: str) -> None:
    sampler, options = THERMOSTATS[name]
    states = draws(sampler, steps=2000, burn_in=400, every=20, noise_variance=NOISE, **options)
    assert np.abs(ratios(states) - 1).max() < 0.05


def test_samplers_without_thermostats_get_too_wide_by_the_gradients_noise() -> None:
    run = {"steps": 2000, "burn_in": 500, "every": 20, "noise_variance": NOISE}
    assert ratios(draws(SGLD, lr=0.02, **run))[-1] == pytest.approx(1 + 0.02 * NOISE / 4, rel=0.05)
    assert ratios(draws(SGHMC, **MOMENTUM, **run))[-1] == pytest.approx(
        1 + STEP**2 * NOISE / (2 * 0.1), rel=0.05
    )
    known = draws(SGHMC, **MOMENTUM, gradient_variance=NOISE, **run)
    assert ratios(known)[-1] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("sampler_class", [SGNHT, ATMC])
def test_linear_regression_with_minibatches(sampler_class: type[Sampler]) -> None:
    """The documented step: average_step 0.0025 for 200 examples in batches of 40.

    The noise of a batch's gradient is correlated between weights, which a thermostat per weight does not
    see. Its effect on the spread falls with the square of the step.
    """
    problem = LinearRegression.make()
    chains, batch, steps, burn_in = 300, 40, 3000, 1000
    net = Chains(np.zeros((chains, 3)))
    theta = net.theta
    sampler = sampler_class(
        net, lr=0.03, train_size=200, prior=GaussianPrior(precision=problem.prior_precision),
        average_step=0.0025, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    order = torch.Generator().manual_seed(2)
    kept = []
    for step in range(steps):
        chosen = torch.randint(200, (chains, batch), generator=order)
        x, y = problem.inputs[chosen], problem.targets[chosen]
        sampler.zero_grad()
        off = y - x @ theta.unsqueeze(2)
        # The mean loss of each chain's own batch; chains do not see one another.
        (0.5 * off.square() / problem.noise_std**2).mean(1).sum().backward()
        sampler.step()
        if step >= burn_in and step % 10 == 0:
            kept.append(theta.detach().double().numpy().copy())
    states = np.concatenate(kept)
    std = np.sqrt(np.diag(problem.covariance))
    np.testing.assert_allclose(states.std(0) / std, 1, atol=0.05)
    # Worth some 1,500 draws: a standard error of 0.026 standard deviations.
    np.testing.assert_allclose((states.mean(0) - problem.mean) / std, 0, atol=0.1)
