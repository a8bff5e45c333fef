"""SGNHT against literal NumPy transcriptions; with a thermostat per weight also in test_atmc.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchbayes.optim.sgnht import SGNHT, sgnht_update

from .sampling import SETTINGS, energy_gradient, model, noise, run, seeded, weights_of

STEPS = [0.05, 0.05, 0.03, 0.03, 0.01]


def test_five_steps_with_one_thermostat() -> None:
    """Ding et al.: ξ ← ξ + h(pᵀp/n − 1), with the mass and the exact friction of the ATMC paper."""
    net = model()
    m, d = 9.0, 2.0
    theta, eta, rows, p, xi = weights_of(net), noise(), [], np.zeros(15), 0.0
    for step, h in enumerate(STEPS):
        beta = d + xi
        p = (
            np.exp(-beta * h) * p
            - (1 - np.exp(-beta * h)) / beta * energy_gradient(theta, step)
            + np.sqrt(d * m * (1 - np.exp(-2 * beta * h)) / beta) * next(eta)
        )
        theta = theta + h * p / m
        xi = xi + h * (p @ p / (len(p) * m) - 1)
        rows.append(theta)
    sampler = SGNHT(
        net, STEPS[0], **SETTINGS, mass=m, friction=d, per_parameter=False, generator=seeded()
    )
    np.testing.assert_allclose(run(net, sampler, STEPS), np.stack(rows), rtol=1e-12)
    assert sampler.param_groups[0]["thermostat"] == pytest.approx(xi, rel=1e-12)


def test_small_steps_are_those_of_ding_et_al() -> None:
    """With m = 1 and h → 0 the exact friction and Euler's agree: p − hξp − h∇U + √(2Ah)η."""
    net = model()
    h, a = 1e-6, 5.0
    theta, eta, rows, p, xi = weights_of(net), noise(), [], np.zeros(15), a
    for step in range(5):
        p = p - h * xi * p - h * energy_gradient(theta, step) + np.sqrt(2 * a * h) * next(eta)
        theta = theta + h * p
        xi = xi + h * (p @ p / len(p) - 1)
        rows.append(theta - weights_of(net))
    start = weights_of(net)
    sampler = SGNHT(
        net, h, **SETTINGS, mass=1.0, friction=a, per_parameter=False, generator=seeded()
    )
    np.testing.assert_allclose(run(net, sampler, [h] * 5) - start, np.stack(rows), rtol=1e-4)


def test_friction_of_zero_and_below() -> None:
    """β → 0 is its limit: p − h∇U + √(2αmh)η; a negative β amplifies, as the formula says."""
    m, d, h = 4.0, 2.0, 0.1
    xi = torch.tensor([-2.0, -2.0 + 1e-12, -2.0 - 1e-12, -3.0], dtype=torch.float64)
    p, grad, eta = (torch.tensor([v] * 4, dtype=torch.float64) for v in (1.5, 0.7, -0.3))
    theta = torch.zeros(4, dtype=torch.float64)
    sgnht_update(theta, p, xi.clone(), grad, eta, h=h, m=m, c=np.inf, d=d, n=1.0, delta=0.0)
    limit = 1.5 - h * 0.7 + np.sqrt(2 * d * m * h) * -0.3
    np.testing.assert_allclose(p[:3].numpy(), limit, rtol=1e-9)
    beta = -1.0
    amplified = (
        np.exp(-beta * h) * 1.5
        - (1 - np.exp(-beta * h)) / beta * 0.7
        + np.sqrt(d * m * (1 - np.exp(-2 * beta * h)) / beta) * -0.3
    )
    assert float(p[3]) == pytest.approx(amplified, rel=1e-12)
