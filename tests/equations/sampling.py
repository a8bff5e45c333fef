"""A small regression whose energy gradient NumPy has in closed form, for samplers to be run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from torchbayes.core.noise import normals_
from torchbayes.optim.sampler import Sampler
from torchbayes.prior import GaussianPrior

N, TEMPERATURE, STEPS = 50, 0.8, 5
PRIOR = GaussianPrior(mean=0.2, precision=1.5)
SETTINGS = {"train_size": N, "prior": PRIOR, "temperature": TEMPERATURE}

_RNG = np.random.default_rng(0)
INPUTS, TARGETS = _RNG.standard_normal((STEPS, 8, 4)), _RNG.standard_normal((STEPS, 8, 3))


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def weights_of(net: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in net.parameters()]).copy()


def energy_gradient(theta: np.ndarray, step: int) -> np.ndarray:
    """∇U = N/T · ∇ mean ½‖Wx + b − y‖² + δ(θ − prior mean)."""
    w, b = theta[:12].reshape(3, 4), theta[12:]
    x, y = INPUTS[step], TARGETS[step]
    off = (x @ w.T + b - y) / len(x)
    likelihood = np.concatenate([(off.T @ x).ravel(), off.sum(0)])
    return N / TEMPERATURE * likelihood + 1.5 * (theta - 0.2)


def noise(seed: int = 1) -> Iterator[np.ndarray]:
    """The numbers that a sampler with this seed draws, step by step."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        eta = torch.empty(15, dtype=torch.float64)
        normals_([eta], generator)
        yield eta.numpy()


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(net: nn.Module, sampler: Sampler, lrs: Sequence[float]) -> np.ndarray:
    """The weights after each of the steps, one row a step."""
    rows = []
    for step, lr in enumerate(lrs):
        for group in sampler.param_groups:
            group["lr"] = lr
        sampler.zero_grad()
        off = net(torch.from_numpy(INPUTS[step])) - torch.from_numpy(TARGETS[step])
        (0.5 * off.square().sum(1)).mean().backward()
        sampler.step()
        rows.append(weights_of(net))
    return np.stack(rows)


def state_of(sampler: Sampler, name: str) -> np.ndarray:
    tensors = [sampler.state[p][name] for g in sampler.param_groups for p in g["params"]]
    return np.concatenate([t.numpy().ravel() for t in tensors])
