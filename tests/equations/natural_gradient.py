"""A linear regression with hand-written per-example gradients, for NumPy transcriptions of updates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from torchbayes.core.noise import normals_
from torchbayes.optim.natural_gradient import WeightOptimizer

N = 40
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 3))
Y = X @ np.array([1.0, -2.0, 0.5]) + 0.3 * RNG.standard_normal(N)
BATCHES = [np.arange(8 * i, 8 * i + 8) % N for i in range(6)]


def model() -> nn.Linear:
    """Weights w and bias b of y = wᵀx + b, in double precision."""
    net = nn.Linear(3, 1).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
        net.bias.fill_(0.05)
    return net


def weights_of(net: nn.Linear) -> np.ndarray:
    """All four of them, the bias last."""
    return np.append(net.weight.detach().numpy().ravel(), net.bias.detach().numpy())


def closure_for(net: nn.Linear, optimizer: torch.optim.Optimizer, batch: np.ndarray) -> Callable:
    x, y = torch.from_numpy(X[batch]), torch.from_numpy(Y[batch])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (0.5 * (net(x)[:, 0] - y) ** 2).mean()
        loss.backward()
        return loss

    return closure


def draws_by_hand(net: nn.Linear, optimizer: WeightOptimizer, batch: np.ndarray, k: int) -> None:
    """A step from k draws on one batch, in a block each."""
    x, y = torch.from_numpy(X[batch]), torch.from_numpy(Y[batch])
    optimizer.zero_grad()
    for _ in range(k):
        with optimizer.sampled():
            ((0.5 * (net(x)[:, 0] - y) ** 2).mean() / k).backward()
    optimizer.step()


def per_example(w: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """The gradient of ½(wᵀx + b − y)² for every example of a batch."""
    x = np.hstack([X[batch], np.ones((len(batch), 1))])
    return (x @ w - Y[batch])[:, None] * x


def noise_from(generator: torch.Generator) -> np.ndarray:
    """What an optimiser draws for one draw of the weights: weight first, then bias."""
    parts = [torch.empty(1, 3, dtype=torch.float64), torch.empty(1, dtype=torch.float64)]
    normals_(parts, generator)
    return np.concatenate([p.numpy().ravel() for p in parts])
