"""OGN is Algorithm 1 of the VOGN paper with w = μ."""

from __future__ import annotations

import numpy as np

from torchbayes.optim.ogn import OGN
from torchbayes.posterior import Point

from .natural_gradient import BATCHES, N, closure_for, model, per_example, weights_of


def test_several_steps() -> None:
    net = model()
    optimizer = OGN(net, 0.05, train_size=N, prior=1.5, damping=0.01, betas=(0.8, 0.3))
    mu, m, s = weights_of(net), np.zeros(4), None
    for batch in BATCHES:
        gi = per_example(mu, batch)
        m = 0.8 * m + gi.mean(0) + 1.5 / N * mu
        h = (gi**2).mean(0)
        s = h if s is None else 0.7 * s + 0.3 * h
        mu = mu - 0.05 * m / (s + 1.5 / N + 0.01)
        optimizer.step(closure_for(net, optimizer, batch))
        np.testing.assert_allclose(weights_of(net), mu, rtol=1e-10)
    assert isinstance(optimizer.posterior(), Point)
