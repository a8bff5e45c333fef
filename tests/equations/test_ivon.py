"""IVON against a NumPy transcription of its formulas, and against its authors' package where installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torchbayes.core.workspace
from torchbayes.optim.ivon import IVON
from torchbayes.prior import GaussianPrior

from .natural_gradient import (
    BATCHES,
    N,
    X,
    Y,
    closure_for,
    draws_by_hand,
    model,
    noise_from,
    per_example,
    weights_of,
)


def ivon(
    mu: np.ndarray, noise, *, steps: int, lr: float, beta1: float, beta2: float, lam: float,
    delta: float | np.ndarray, h0: float, k: int = 1, xi: float = np.inf,
    prior_mean: float | np.ndarray = 0.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    mu = mu.copy()
    m, h = np.zeros_like(mu), np.full_like(mu, h0)
    for t in range(steps):
        g_hat, h_hat = np.zeros_like(mu), np.zeros_like(mu)
        for _ in range(k):
            theta = mu + noise() / np.sqrt(lam * (h + delta))
            g = per_example(theta, BATCHES[t]).mean(0)
            g_hat += g / k
            h_hat += g * (theta - mu) * lam * (h + delta) / k
        m = beta1 * m + (1 - beta1) * g_hat
        h = (
            beta2 * h
            + (1 - beta2) * h_hat
            + 0.5 * (1 - beta2) ** 2 * (h - h_hat) ** 2 / (h + delta)
        )
        step = (m / (1 - beta1 ** (t + 1)) + delta * (mu - prior_mean)) / (h + delta)
        mu = mu - lr * (h0 + delta) * np.clip(step, -xi, xi)
    return mu, h


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("xi", [np.inf, 0.05])
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("by_hand", [False, True])
def test_five_steps(k: int, xi: float, tau: float, by_hand: bool) -> None:
    net = model()
    optimizer = IVON(
        net, 0.1, train_size=N, prior=2.0, temperature=tau, mc_samples=k,
        betas=(0.8, 0.9), initial_curvature=0.5, clip_radius=xi,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    mu, h = ivon(
        weights_of(net), lambda: noise_from(generator), steps=5, lr=0.1, beta1=0.8, beta2=0.9,
        lam=N / tau, delta=2.0 * tau / N, h0=0.5, k=k, xi=xi,
    )  # fmt: skip
    for t in range(5):
        if by_hand:
            draws_by_hand(net, optimizer, BATCHES[t], k)
        else:
            optimizer.step(closure_for(net, optimizer, BATCHES[t]))
    np.testing.assert_allclose(weights_of(net), mu, rtol=1e-8)
    found = optimizer.posterior().std()
    np.testing.assert_allclose(
        np.append(found["weight"].numpy().ravel(), found["bias"].numpy()),
        1 / np.sqrt(N / tau * h + 2.0), rtol=1e-8,
    )  # fmt: skip


def test_a_prior_of_its_own_for_every_weight() -> None:
    mean = {"weight": torch.tensor([[1.0, 2.0, 3.0]]), "bias": torch.tensor([0.5])}
    precision = {"weight": torch.tensor([[0.5, 4.0, 9.0]]), "bias": torch.tensor([0.0])}
    net = model()
    optimizer = IVON(
        net, 0.1, train_size=N, prior=GaussianPrior(mean=mean, precision=precision), betas=(0.8, 0.9),
        initial_curvature=1.0, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    mu, _ = ivon(
        weights_of(net), lambda: noise_from(generator), steps=4, lr=0.1, beta1=0.8, beta2=0.9,
        lam=N, delta=np.array([0.5, 4.0, 9.0, 0.0]) / N, h0=1.0,
        prior_mean=np.array([1.0, 2.0, 3.0, 0.5]),
    )  # fmt: skip
    for t in range(4):
        optimizer.step(closure_for(net, optimizer, BATCHES[t]))
    np.testing.assert_allclose(weights_of(net), mu, rtol=1e-8)


@pytest.mark.parametrize("k", [1, 2])
def test_follows_the_authors_package(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step for step on its noise, which is read off the weights inside its own sampling context."""
    theirs = pytest.importorskip("ivon")
    nets = model(), model()
    torch.manual_seed(0)
    reference = theirs.IVON(
        nets[0].parameters(), lr=0.1, ess=N, weight_decay=2.0 / N, beta1=0.8, beta2=0.99,
        hess_init=0.5, mc_samples=k,
    )  # fmt: skip
    ours = IVON(nets[1], 0.1, train_size=N, prior=2.0, betas=(0.8, 0.99), initial_curvature=0.5)
    for batch in BATCHES:
        draws = []
        for _ in range(k):
            before = weights_of(nets[0])
            with reference.sampled_params(train=True):
                draws.append(weights_of(nets[0]) - before)
                closure_for(nets[0], reference, batch)()
        reference.step()
        std = np.concatenate([s.numpy().ravel() for s in ours.posterior().std().values()])
        for offset in draws:
            epsilon = torch.from_numpy(offset / std)

            def fill(buffers: list, _generator: object, epsilon: torch.Tensor = epsilon) -> None:
                for buffer, part in zip(buffers, epsilon.split([3, 1]), strict=True):
                    buffer.copy_(part.view_as(buffer))

            monkeypatch.setattr(torchbayes.core.workspace, "normals_", fill)
            x, y = torch.from_numpy(X[batch]), torch.from_numpy(Y[batch])
            with ours.sampled():
                ((0.5 * (nets[1](x)[:, 0] - y) ** 2).mean() / k).backward()
        ours.step()
        ours.zero_grad()
        np.testing.assert_allclose(weights_of(nets[1]), weights_of(nets[0]), rtol=1e-6)
