"""PSGLD against a literal NumPy transcription of Algorithm 1 of Li et al."""

from __future__ import annotations

import numpy as np

from torchbayes.optim.psgld import PSGLD

from .sampling import SETTINGS, N, energy_gradient, model, noise, run, seeded, state_of, weights_of

EPSILONS = [1e-2, 1e-2, 4e-3, 4e-3, 1e-3]


def test_five_steps() -> None:
    net = model()
    alpha, lam = 0.9, 1e-3
    theta, eta, rows, v = weights_of(net), noise(), [], np.zeros(15)
    for step, epsilon in enumerate(EPSILONS):
        gradient = energy_gradient(theta, step)
        v = alpha * v + (1 - alpha) * (gradient / N) ** 2
        g = 1 / (lam + np.sqrt(v / (1 - alpha ** (step + 1))))
        theta = theta - epsilon / 2 * g * gradient + np.sqrt(epsilon * g) * next(eta)
        rows.append(theta)
    sampler = PSGLD(net, EPSILONS[0], **SETTINGS, decay=alpha, damping=lam, generator=seeded())
    np.testing.assert_allclose(run(net, sampler, EPSILONS), np.stack(rows), rtol=1e-12)
    np.testing.assert_allclose(state_of(sampler, "square"), v, rtol=1e-12)
