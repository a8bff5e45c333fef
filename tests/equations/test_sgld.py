"""SGLD against a literal NumPy transcription of Welling and Teh's Eq. (4)."""

from __future__ import annotations

import numpy as np

from torchbayes.optim.sgld import SGLD

from .sampling import SETTINGS, energy_gradient, model, noise, run, seeded, weights_of

EPSILONS = [1e-2, 1e-2, 4e-3, 4e-3, 1e-3]


def test_five_steps() -> None:
    net = model()
    theta, eta, rows = weights_of(net), noise(), []
    for step, epsilon in enumerate(EPSILONS):
        gradient = energy_gradient(theta, step)
        theta = theta - epsilon / 2 * gradient + np.sqrt(epsilon) * next(eta)
        rows.append(theta)
    ours = run(net, SGLD(net, EPSILONS[0], **SETTINGS, generator=seeded()), EPSILONS)
    np.testing.assert_allclose(ours, np.stack(rows), rtol=1e-12)
