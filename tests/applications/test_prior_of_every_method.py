"""Every variational method honours a prior of single weights: the exact posterior of a regression."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.applications.continual import can_remember
from torchbayes.train.registry import METHODS

N, SIGMA = 200, 0.5
TRUE = np.array([1.0, -1.0])
PRIOR_MEAN = np.array([1.1, -1.3])
# The data know each weight with a precision of (N/2)/σ² = 400: a prior that hardly counts, and an equal one.
PRIOR_PRECISION = np.array([4.0, 400.0])
OPTIONS = {
    "vogn": {"lr": 0.02, "betas": (0.9, 0.02), "damping": 0.0},
    "ogn": {"lr": 0.02, "betas": (0.9, 0.02), "damping": 0.0},
    "ivon": {"lr": 0.1, "betas": (0.9, 0.995), "initial_curvature": 2.0},
    "kfac": {"lr": 0.02, "betas": (0.9, 0.02)},
    "noisy-kfac": {"lr": 0.02, "betas": (0.9, 0.02)},
    "bbb": {"lr": 0.02, "init_std": 0.05},
    "hwa": {"lr": 0.03, "init_std": 0.05, "cycles": 10},
    "map": {"lr": 0.02},
    "swa": {"lr": 0.02},
    "swag": {"lr": 0.02},
    "ensemble": {"lr": 0.02, "members": 2},
}


def test_gaussian_posteriors_can_be_the_next_prior() -> None:
    able = {name for name in METHODS if can_remember(name)}
    assert able >= {"vogn", "ivon", "noisy-kfac", "bbb", "hwa", "swag"}
    assert not able & {"map", "mle", "ensemble", "dropout", "hypernet", "sgld", "ogn", "kfac"}


@pytest.mark.parametrize("method", OPTIONS)
def test_reaches_the_exact_posterior(method: str) -> None:
    inputs = np.repeat(np.eye(2), N // 2, axis=0)
    # Residuals of +σ and −σ, so that squared gradients are the Hessian.
    targets = inputs @ TRUE + SIGMA * np.tile([1.0, -1.0], N // 2)
    data = tuple(torch.tensor(a, dtype=torch.float64) for a in (inputs, targets[:, None]))
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False).double()
    prior = tb.GaussianPrior(
        mean={"weight": torch.tensor(PRIOR_MEAN[None])},
        precision={"weight": torch.tensor(PRIOR_PRECISION[None])},
    )
    run = tb.fit(
        net, data, method, epochs=400, batch_size=N, likelihood=tb.GaussianNoise(SIGMA),
        schedule="cosine", progress=False, prior=prior, **OPTIONS[method],
    )  # fmt: skip
    from_data = (N / 2) / SIGMA**2
    precision = from_data + PRIOR_PRECISION
    mean = (from_data * TRUE + PRIOR_PRECISION * PRIOR_MEAN) / precision
    found = run.posterior.mean()["weight"].numpy()[0]
    # Without the prior the second mean would be off by 4 standard deviations.
    np.testing.assert_allclose(found, mean, rtol=0, atol=0.5 / np.sqrt(precision.max()))
    if method in ("vogn", "ivon", "hwa"):
        std = run.posterior.std()["weight"].numpy()[0]
        # Without the prior the second would be 41 % larger; IVON's is noisy to about 10 %.
        np.testing.assert_allclose(std, 1 / np.sqrt(precision), rtol=0.2)
