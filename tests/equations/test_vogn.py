"""VOGN against literal NumPy transcriptions of Algorithm 1, several steps on the same noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchbayes.optim.vogn import VOGN
from torchbayes.prior import GaussianPrior

from .natural_gradient import (
    BATCHES,
    N,
    closure_for,
    draws_by_hand,
    model,
    noise_from,
    per_example,
    weights_of,
)


def algorithm_1(
    mu: np.ndarray, noise, *, steps: int, lrs: list[float], beta1: float, beta2: float,
    delta: float | np.ndarray, gamma: float, taus: list[float], k: int, rho: float,
    s0: float | None, prior_mean: float | np.ndarray = 0.0, correct: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The pseudo-code of the paper, with τ where the tempered posterior needs it."""
    mu = mu.copy()
    m = np.zeros_like(mu)
    s = None if s0 is None else np.full_like(mu, s0)
    big_n = rho * N  # line 2
    for t in range(steps):
        tau = taus[t]
        delta_t = tau * delta / big_n  # line 2
        g, h = np.zeros_like(mu), np.zeros_like(mu)
        for _ in range(k):  # lines 7 to 13
            w = mu
            if s is not None:
                w = mu + noise() * np.sqrt(tau / (big_n * (s + delta_t + gamma)))  # line 9
            gi = per_example(w, BATCHES[t])
            g += gi.mean(0) / k
            h += (gi**2).mean(0) / k
        factor = lrs[t] / lrs[t - 1] if correct and t > 0 and lrs[t] < lrs[t - 1] else 1.0
        m = factor * beta1 * m + g + delta_t * (mu - prior_mean)  # line 17
        s = h if s is None else (1 - beta2) * s + beta2 * h  # line 18
        mu = mu - lrs[t] * m / (s + delta_t + gamma)  # line 19
    return mu, s


CASES = {
    "plain": {},
    "initial precision": {"s0": 0.7},
    "several draws": {"k": 3, "s0": 0.5},
    "augmented": {"rho": 10.0, "s0": 0.5},
    "warm-up": {"warmup": (0.1, 4), "tau": 0.8},
    "corrected momentum": {"lrs": [0.05, 0.05, 0.005, 0.005, 0.005], "correct": True},
}


@pytest.mark.parametrize("case", CASES)
def test_five_steps_of_vogn(case: str) -> None:
    options = CASES[case]
    tau, lrs = options.get("tau", 1.0), options.get("lrs", [0.05] * 5)
    start, steps = options.get("warmup", (None, 0))
    net = model()
    optimizer = VOGN(
        net, lrs[0], train_size=N, prior=1.5, temperature=tau, initial_temperature=start,
        temperature_steps=steps, mc_samples=options.get("k", 1), damping=0.01, betas=(0.8, 0.3),
        initial_precision=options.get("s0"), augmentation=options.get("rho", 1.0),
        momentum_correction=options.get("correct", False),
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    taus = [tau if start is None else start + (tau - start) * min(1, t / steps) for t in range(6)]
    mu, s = algorithm_1(
        weights_of(net), lambda: noise_from(generator), steps=5, lrs=lrs, beta1=0.8, beta2=0.3,
        delta=1.5, gamma=0.01, taus=taus, k=options.get("k", 1), rho=options.get("rho", 1.0),
        s0=options.get("s0"), correct=options.get("correct", False),
    )  # fmt: skip
    for t in range(5):
        optimizer.param_groups[0]["lr"] = lrs[t]
        optimizer.step(closure_for(net, optimizer, BATCHES[t]))
    np.testing.assert_allclose(weights_of(net), mu, rtol=1e-10)
    big_n = options.get("rho", 1.0) * N
    std = np.sqrt(taus[5] / (big_n * (s + taus[5] * 1.5 / big_n + 0.01)))
    found = optimizer.posterior().std()
    np.testing.assert_allclose(
        np.append(found["weight"].numpy().ravel(), found["bias"].numpy()), std, rtol=1e-10
    )


def test_a_prior_of_its_own_for_every_weight() -> None:
    mean = {"weight": torch.tensor([[1.0, 2.0, 3.0]]), "bias": torch.tensor([0.5])}
    precision = {"weight": torch.tensor([[0.5, 4.0, 9.0]]), "bias": torch.tensor([0.0])}
    net = model()
    optimizer = VOGN(
        net, 0.05, train_size=N, prior=GaussianPrior(mean=mean, precision=precision), damping=0.01,
        betas=(0.8, 0.3), initial_precision=1.0, temperature_steps=0,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    mu, _ = algorithm_1(
        weights_of(net), lambda: noise_from(generator), steps=4, lrs=[0.05] * 4, beta1=0.8,
        beta2=0.3, delta=np.array([0.5, 4.0, 9.0, 0.0]), gamma=0.01, taus=[1.0] * 4, k=1, rho=1.0,
        s0=1.0, prior_mean=np.array([1.0, 2.0, 3.0, 0.5]),
    )  # fmt: skip
    for t in range(4):
        optimizer.step(closure_for(net, optimizer, BATCHES[t]))
    np.testing.assert_allclose(weights_of(net), mu, rtol=1e-10)


def test_sampled_blocks_are_the_same_as_a_closure() -> None:
    results = []
    for with_closure in (True, False):
        net = model()
        optimizer = VOGN(
            net, 0.05, train_size=N, mc_samples=2, initial_precision=1.0,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        for t in range(3):
            if with_closure:
                optimizer.step(closure_for(net, optimizer, BATCHES[t]))
            else:
                draws_by_hand(net, optimizer, BATCHES[t], 2)
        results.append(weights_of(net))
    np.testing.assert_allclose(*results, rtol=1e-12)
