"""ATMC against literal NumPy transcriptions of Algorithm 1, with Eq. (10) corrected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from torchbayes.optim.atmc import ATMC, atmc_update
from torchbayes.optim.sgnht import SGNHT

from .sampling import SETTINGS, energy_gradient, model, noise, run, seeded, state_of, weights_of

STEPS = [0.05, 0.05, 0.03, 0.03, 0.01]
Alpha = Callable[[np.ndarray], np.ndarray]


def algorithm_1(
    theta: np.ndarray, m: float, d: float, c: float = np.inf, alpha: Alpha | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eqs. (4), (9), (10): the whole trajectory, and the last p and ξ.

    Eq. (10) with e^(−βh) and the mass under the root; for a finite c the kinetic energy of Eq. (5), whose
    derivatives are p/M and m²/M³.
    """
    eta, rows = noise(), []
    p, xi = np.zeros(15), np.zeros(15)  # lines 2 and 3
    for step, h in enumerate(STEPS):
        big_m = m if np.isinf(c) else m * np.sqrt(p**2 / (m**2 * c**2) + 1)  # Eq. (6)
        a = np.maximum(d - xi, 0) if alpha is None else alpha(xi)  # line 7
        beta = (a + xi) * m / big_m  # line 8
        gamma1 = (np.exp(beta * h) - 1) / beta  # Eq. (11)
        gamma2 = (np.exp(2 * beta * h) - 1) / beta
        g = energy_gradient(theta, step)  # line 5
        p = np.exp(-beta * h) * (p - gamma1 * g + np.sqrt(m * gamma2 * a) * next(eta))  # Eq. (10)
        big_m = m if np.isinf(c) else m * np.sqrt(p**2 / (m**2 * c**2) + 1)
        theta = theta + h * p / big_m  # Eq. (9)
        xi = xi + h * (m * p**2 / big_m**2 - m**3 / big_m**3)  # p²/m − 1 for c → ∞
        rows.append(theta)
    return np.stack(rows), p, xi


# A small D makes some thermostats pass it within five steps, a large one none.
@pytest.mark.parametrize("d", [0.1, 10.0])
@pytest.mark.parametrize("c", [np.inf, 2.0, 0.05])
def test_five_steps(d: float, c: float) -> None:
    net = model()
    rows, p, xi = algorithm_1(weights_of(net), m=9.0, d=d, c=c)
    if d == 0.1 and c > 1:
        assert (xi > d).any()
        assert (xi < d).any()
    sampler = ATMC(
        net, STEPS[0], **SETTINGS, mass=9.0, friction=d, speed_limit=c, generator=seeded()
    )
    np.testing.assert_allclose(run(net, sampler, STEPS), rows, rtol=1e-11)
    np.testing.assert_allclose(state_of(sampler, "momentum"), p, rtol=1e-10)
    np.testing.assert_allclose(state_of(sampler, "thermostat"), xi, rtol=1e-9, atol=1e-12)


def test_a_high_speed_limit_is_the_gaussian_form() -> None:
    one, two = model(), model()
    options = {**SETTINGS, "mass": 9.0, "friction": 2.0}
    fast = run(one, ATMC(one, STEPS[0], **options, speed_limit=1e7, generator=seeded()), STEPS)
    none = run(two, ATMC(two, STEPS[0], **options, max_step=np.inf, generator=seeded()), STEPS)
    np.testing.assert_allclose(fast, none, rtol=1e-9)
    slow = model()
    limited = run(slow, ATMC(slow, STEPS[0], **options, speed_limit=0.5, generator=seeded()), STEPS)
    assert np.abs(limited - none).max() > 1e-3


@pytest.mark.parametrize("c", [np.inf, 2.0])
def test_with_a_constant_alpha_it_is_sgnht(c: float) -> None:
    net = model()
    rows, p, xi = algorithm_1(weights_of(net), m=9.0, d=2.0, c=c, alpha=lambda xi: 2.0 + 0 * xi)
    limit = {} if np.isinf(c) else {"speed_limit": c}
    sampler = SGNHT(net, STEPS[0], **SETTINGS, mass=9.0, friction=2.0, **limit, generator=seeded())
    np.testing.assert_allclose(run(net, sampler, STEPS), rows, rtol=1e-11)
    np.testing.assert_allclose(state_of(sampler, "momentum"), p, rtol=1e-10)
    np.testing.assert_allclose(state_of(sampler, "thermostat"), xi, rtol=1e-9)


def test_the_papers_settings_for_cifar_10() -> None:
    """Section 5.1: m = (0.0003/h)⁻², c = 0.001/h, D = −log(0.9)/h at h = 0.001."""
    sampler = ATMC(model(), 1e-3, train_size=50_000, average_step=3e-4, max_step=1e-3, momentum=0.9)
    group = sampler.param_groups[0]
    assert group["mass"] == pytest.approx((3e-4 / 1e-3) ** -2)
    assert group["speed_limit"] == pytest.approx(1e-3 / 1e-3)
    assert group["friction"] == pytest.approx(-np.log(0.9) / 1e-3)


@pytest.mark.parametrize("c", [np.inf, 1.0])
def test_the_stationary_spread_of_the_momentum_has_the_factor_m(c: float) -> None:
    """Without a force the update keeps p ∝ exp(−K): its variance is E[p²], which is m for a Gaussian."""
    m, d, h, count = 11.1, 10.0, 0.01, 20_000
    generator = torch.Generator().manual_seed(0)
    p, xi = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
    theta, zero = torch.zeros_like(p), torch.zeros_like(p)
    for _ in range(150):  # e^(−2·10·0.01·150) is nothing
        xi.zero_()
        eta = torch.randn(count, dtype=torch.float64, generator=generator)
        atmc_update(theta, p, xi, zero, eta, h=h, m=m, c=c, d=d, n=1.0, delta=0.0)
    grid = np.linspace(-60, 60, 200_001)
    energy = (
        grid**2 / (2 * m) if np.isinf(c) else m * c**2 * (np.sqrt((grid / (m * c)) ** 2 + 1) - 1)
    )
    density = np.exp(-energy) / np.exp(-energy).sum()
    truth = (density * grid**2).sum()
    kurtosis = (density * grid**4).sum() / truth**2
    error = np.sqrt((kurtosis - 1) / count)
    # Freezing M(p) over a step costs O(hD) of the excess over a Gaussian: 2 %.
    bias = 0.0 if np.isinf(c) else 0.02
    assert abs(float(p.square().mean()) / truth - 1) < 5 * error + bias
