"""Linear regression with known noise: the posterior is a Gaussian in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchbayes.likelihood import GaussianNoise

__all__ = ["LinearRegression"]


@dataclass(frozen=True, eq=False)
class LinearRegression:
    """y = W x + noise of standard deviation 1, for several independent outputs.

    Every input occurs twice, with residuals +1 and −1 in an order that differs between outputs. So the least
    squares solution is exactly the true W, and the squared gradients of the examples, from which VOGN and
    K-FAC learn the curvature, are on average the curvature itself. All outputs have the same posterior, so
    their average has little Monte-Carlo error.

    With a prior N(0, 1/δ) and a temperature T, every output's weights have the posterior N(m, P⁻¹) with

        P = XᵀX/T + δI,  m = P⁻¹ Xᵀy/T,

    and among all Gaussians with independent weights, N(m, 1/diag P) is the nearest to it in KL(q‖p).

    Attributes:
        inputs: X, (examples, weights).
        targets: (examples, outputs).
    """

    inputs: Tensor
    targets: Tensor

    @classmethod
    def make(
        cls, train_size: int, weights: int, outputs: int, seed: int = 0, *, condition: float = 1.0
    ) -> LinearRegression:
        """Draw a problem.

        Args:
            train_size: Number of examples; even.
            weights: Number of weights of each output.
            outputs: Number of regressions on the same inputs.
            seed: Random seed.
            condition: With a number above 1, how many times as much one direction of the inputs varies as
                another, in variance; the directions are none of the weights'. By default about 4.
        """
        if train_size < 4 * weights or train_size % 2:
            raise ValueError(
                f"train_size is {train_size}: expected an even number of at least {4 * weights}"
            )
        generator = torch.Generator().manual_seed(seed)
        half = train_size // 2
        # Neighbours are slightly correlated, so that the posterior is not a product of its marginals.
        mixing = torch.eye(weights) + 0.4 * torch.diag(torch.ones(weights - 1), 1)
        x = torch.randn(half, weights, generator=generator) @ mixing
        if condition > 1:
            axes, _ = torch.linalg.qr(torch.randn(weights, weights, generator=generator))
            white, _ = torch.linalg.qr(x)
            x = white * half**0.5 * torch.logspace(0, -0.5, weights, base=condition) @ axes.T
        signs = 1.0 - 2.0 * torch.randint(2, (half, outputs), generator=generator)
        truth = torch.linspace(-1, 1, weights).unsqueeze(1).expand(weights, outputs)
        order = torch.randperm(train_size, generator=generator)
        inputs, residuals = torch.cat([x, x])[order], torch.cat([signs, -signs])[order]
        return cls(inputs, inputs @ truth + residuals)

    def model(self) -> nn.Linear:
        """Make a linear layer for the problem."""
        return nn.Linear(self.inputs.shape[1], self.targets.shape[1], bias=False)

    def likelihood(self) -> GaussianNoise:
        """Return the noise of the problem."""
        return GaussianNoise(std=1.0)

    def precision(self, prior_precision: float, temperature: float = 1.0) -> Tensor:
        """Compute P, in float64."""
        x = self.inputs.double()
        return x.T @ x / temperature + prior_precision * torch.eye(x.shape[1], dtype=x.dtype)

    def mean(self, prior_precision: float, temperature: float = 1.0) -> Tensor:
        """Compute the posterior mean of one output's weights, which is the same for all outputs."""
        x, y = self.inputs.double(), self.targets.double()[:, :1]
        rhs = x.T @ y / temperature
        mean: Tensor = torch.linalg.solve(self.precision(prior_precision, temperature), rhs)
        return mean[:, 0]
