"""SGHMC against literal NumPy transcriptions of Eqs. (13) and (15) of Chen et al."""

from __future__ import annotations

import numpy as np
import pytest

from torchbayes.optim.sghmc import SGHMC

from .sampling import SETTINGS, STEPS, energy_gradient, model, noise, run, seeded, weights_of


@pytest.mark.parametrize("estimate", [0.0, 40.0])
def test_five_steps_of_equation_13_with_a_changing_step(estimate: float) -> None:
    net = model()
    steps, mass, c_over_m = [0.1, 0.1, 0.05, 0.05, 0.02], 12.0, 1.5
    theta, eta, rows, r = weights_of(net), noise(), [], np.zeros(15)
    for step, epsilon in enumerate(steps):
        c, b = c_over_m * mass, 0.5 * epsilon * estimate
        spread = np.sqrt(2 * (c - b) * epsilon)
        r = r - epsilon * energy_gradient(theta, step) - epsilon * c / mass * r + spread * next(eta)
        theta = theta + epsilon / mass * r
        rows.append(theta)
    sampler = SGHMC(
        net, steps[0], **SETTINGS, mass=mass, friction=c_over_m, gradient_variance=estimate,
        generator=seeded(),
    )  # fmt: skip
    np.testing.assert_allclose(run(net, sampler, steps), np.stack(rows), rtol=1e-12)


def test_five_steps_of_equation_15_in_interpretable_terms() -> None:
    net = model()
    eta_rate, alpha = 0.02**2, 0.1
    theta, eta, rows, v = weights_of(net), noise(), [], np.zeros(15)
    for step in range(STEPS):
        v = (1 - alpha) * v - eta_rate * energy_gradient(theta, step)
        v = v + np.sqrt(2 * alpha * eta_rate) * next(eta)
        theta = theta + v
        rows.append(theta)
    sampler = SGHMC(
        net, 0.003, **SETTINGS, average_step=0.02, momentum=0.9, generator=seeded()
    )  # the time step does not matter as long as it is constant
    np.testing.assert_allclose(run(net, sampler, [0.003] * STEPS), np.stack(rows), rtol=1e-12)
