"""Posteriors that are known in closed form, for methods to be held against.

A method plugs in by one line of a parametrisation: see `test_harness.py`, where exact sampling and a
deliberately wrong scale show that the checks can pass and can fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import torchbayes as tb


@dataclass(frozen=True)
class LinearRegression:
    """Bayesian linear regression with known noise and a N(0, 1/δ) prior: a Gaussian posterior.

    precision = XᵀX/σ² + δI,  mean = precision⁻¹ Xᵀy/σ²,
    and the best mean-field Gaussian (in KL(q‖p)) has the same mean and variance 1/diag(precision).
    """

    inputs: Tensor
    targets: Tensor
    noise_std: float
    prior_precision: float

    @classmethod
    def make(
        cls, count: int = 200, dimension: int = 3, noise_std: float = 0.5,
        prior_precision: float = 2.0, seed: int = 0,
    ) -> LinearRegression:  # fmt: skip
        rng = np.random.default_rng(seed)
        mixing = np.eye(dimension) + 0.4 * rng.standard_normal((dimension, dimension))
        x = rng.standard_normal((count, dimension)) @ mixing
        w = rng.standard_normal((dimension, 1))
        y = x @ w + noise_std * rng.standard_normal((count, 1))
        return cls(
            torch.from_numpy(x).float(), torch.from_numpy(y).float(), noise_std, prior_precision
        )

    @property
    def model(self) -> nn.Linear:
        return nn.Linear(self.inputs.shape[1], 1, bias=False)

    @property
    def likelihood(self) -> tb.GaussianNoise:
        return tb.GaussianNoise(std=self.noise_std)

    @property
    def precision(self) -> np.ndarray:
        x = self.inputs.double().numpy()
        return x.T @ x / self.noise_std**2 + self.prior_precision * np.eye(x.shape[1])

    @property
    def mean(self) -> np.ndarray:
        x, y = self.inputs.double().numpy(), self.targets.double().numpy()
        return np.linalg.solve(self.precision, x.T @ y / self.noise_std**2)[:, 0]

    @property
    def covariance(self) -> np.ndarray:
        return np.linalg.inv(self.precision)

    @property
    def mean_field_std(self) -> np.ndarray:
        return 1 / np.sqrt(np.diag(self.precision))


def check_moments(
    draws: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
    *,
    effective: float | None = None,
    sigmas: float = 5.0,
) -> None:
    """Hold draws (count, dimension) against a Gaussian, within Monte-Carlo error.

    Args:
        draws: One draw per row.
        mean: The exact mean.
        covariance: The exact covariance.
        effective: The number of independent draws they are worth; all of them if not given.
        sigmas: The width of the tolerance in standard errors.
    """
    count = float(len(draws)) if effective is None else effective
    std = np.sqrt(np.diag(covariance))
    off = np.abs(draws.mean(0) - mean) / (std / math.sqrt(count))
    assert off.max() < sigmas, f"mean is {off.max():.1f} standard errors off"
    # The standard error of an entry of a sample covariance of Gaussians (Isserlis).
    error = np.sqrt((np.outer(std**2, std**2) + covariance**2) / count)
    off = np.abs(np.cov(draws.T, bias=True) - covariance) / error
    assert off.max() < sigmas, f"covariance is {off.max():.1f} standard errors off"


def draws_of(posterior: tb.Posterior, name: str, count: int, seed: int = 0) -> np.ndarray:
    """Draws of one weight tensor as rows."""
    generator = torch.Generator().manual_seed(seed)
    return np.stack([d[name].double().flatten().numpy() for d in posterior.draws(count, generator)])


class GaussianTarget(nn.Module):
    """A Gaussian density as a network: its output is the energy ½(θ−m)ᵀP(θ−m), its input nothing.

    Dividing the energy by `train_size` gives the mean loss whose posterior, under a flat prior, it is.
    The covariance has eigenvalues from 1 down to 1/condition along random axes.
    """

    def __init__(self, dimension: int = 10, condition: float = 100.0, seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        axes, _ = np.linalg.qr(rng.standard_normal((dimension, dimension)))
        variances = np.geomspace(1, 1 / condition, dimension)
        self.exact_mean = rng.standard_normal(dimension)
        self.exact_covariance = axes @ np.diag(variances) @ axes.T
        self.theta = nn.Parameter(torch.from_numpy(self.exact_mean).clone())
        self._precision = torch.from_numpy(np.linalg.inv(self.exact_covariance))
        self._mean = torch.from_numpy(self.exact_mean)

    def forward(self) -> Tensor:
        off = self.theta - self._mean.to(self.theta.dtype)
        return 0.5 * off @ self._precision.to(off.dtype) @ off
