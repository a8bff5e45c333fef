"""Small trained networks that the tests of Laplace share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import torchbayes as tb


class Task:
    """A trained network and its data."""

    def __init__(
        self, net: nn.Module, x: Tensor, y: Tensor, likelihood: tb.Likelihood, epochs: int
    ) -> None:
        self.x, self.y, self.likelihood = x, y, likelihood
        run = tb.fit(
            net, (x, y), likelihood=likelihood, epochs=epochs, batch_size=len(x), lr=0.03,
            prior=1.0, progress=False,
        )  # fmt: skip
        self.net = run.model.eval()

    def laplace(self, **options: object) -> tb.Laplace:
        """Build the Laplace posterior under test."""
        return tb.Laplace(self.net, (self.x, self.y), self.likelihood, **options)  # type: ignore[arg-type]


@functools.cache
def task(name: str) -> Task:
    """Return a task by name; its network must not be changed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "linear":
            x = torch.randn(60, 3)
            y = x @ torch.tensor([[1.0, 0.5], [-0.5, 0.0], [0.3, 1.0]]) + 0.3 * torch.randn(60, 2)
            return Task(nn.Linear(3, 2), x, y, tb.GaussianNoise(0.3), 800)
        if name == "logistic":
            x = torch.randn(80, 4)
            y = (x @ torch.randn(4, 3) + torch.randn(80, 3)).argmax(1)
            return Task(nn.Linear(4, 3), x, y, tb.Categorical(), 400)
        x = torch.randn(48, 2, 6, 6)
        y = (x[:, 0, :3].sum((1, 2)) > 0).long() + (x[:, 1, 3:].sum((1, 2)) > 0).long()
        if name == "norm":
            net = nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
                nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3),
            )  # fmt: skip
        else:
            net = nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 3, 2),
                nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3),
            )  # fmt: skip
        return Task(net, x, y, tb.Categorical(), 300)
