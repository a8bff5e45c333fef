"""Bayes by Backprop on linear regression: the best mean-field Gaussian is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import torchbayes as tb
from torchbayes.variational import (
    MeanField,
    flipout,
    local_reparameterisation,
    shared_draw,
)
from torchbayes.variational.estimators import Estimator

from .targets import LinearRegression

PROBLEM = LinearRegression.make()


# One draw's gradient of log σ has a standard deviation of about 2 and a curvature of 2, so that T of them
# determine log σ to about 1/√T.
TAIL = 1000
TOLERANCE = 4 / math.sqrt(TAIL)


@pytest.mark.parametrize("estimator", [shared_draw, flipout, local_reparameterisation])
def test_has_the_exact_mean_and_mean_field_variance(estimator: Estimator) -> None:
    torch.manual_seed(0)
    net = MeanField(
        PROBLEM.model,
        tb.GaussianPrior(precision=PROBLEM.prior_precision),
        estimator,
        init_std=0.05,
        generator=torch.Generator().manual_seed(0),
    )
    loss, size = PROBLEM.likelihood.loss, len(PROBLEM.inputs)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    means, rhos = [], []
    for step in range(500 + TAIL):
        if step == 400:
            optimizer.param_groups[0]["lr"] = 0.01
        optimizer.zero_grad()
        (loss(net(PROBLEM.inputs), PROBLEM.targets) + net.kl() / size).backward()
        optimizer.step()
        if step >= 500:  # the average of the last iterates: less noise than any of them
            means.append(net.model.weight.detach().clone())
            rhos.append(net.rho.weight.detach().clone())
    mean = torch.stack(means).mean(0).double().numpy()[0]
    std = np.log1p(np.exp(torch.stack(rhos).mean(0).double().numpy()[0]))
    exact, marginal = PROBLEM.mean_field_std, np.sqrt(np.diag(PROBLEM.covariance))
    assert np.abs(std / exact - 1).max() < TOLERANCE
    assert np.abs((mean - PROBLEM.mean) / exact).max() < TOLERANCE
    # The posterior's own marginals are wider: the check can tell the two apart.
    assert np.abs(std / marginal - 1).max() > 2 * TOLERANCE
