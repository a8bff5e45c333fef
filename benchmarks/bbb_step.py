"""The time of one Bayes by Backprop step relative to a plain Adam step on the same network.

All variants take turns, so that what else the machine does falls on all of them alike; the ratios are of
medians. Both sides use torch's fused Adam, which is the harder comparison for Bayes by Backprop.

    python benchmarks/bbb_step.py [--rounds 60] [--threads 2] [--network mlp]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes.prior import GaussianPrior, ScaleMixturePrior
from torchbayes.variational import MeanField, flipout, local_reparameterisation, shared_draw


class Block(nn.Module):
    """Two convolutions and a shortcut, without norm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Add to the shortcut, which is padded where there are more channels."""
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return F.relu(shortcut + 0.3 * self.second(F.relu(self.first(x))))


def mlp() -> tuple[nn.Module, Tensor]:
    layers = [
        nn.Linear(784, 1200),
        nn.ReLU(),
        nn.Linear(1200, 1200),
        nn.ReLU(),
        nn.Linear(1200, 10),
    ]
    return nn.Sequential(*layers), torch.randn(128, 784)


def lenet() -> tuple[nn.Module, Tensor]:
    layers = [
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    ]
    return nn.Sequential(*layers), torch.randn(128, 3, 32, 32)


def resnet20() -> tuple[nn.Module, Tensor]:
    widths = [16, 16, 16, 32, 32, 32, 64, 64, 64]
    before = [16, *widths[:-1]]
    blocks = [Block(i, o, 1 if i == o else 2) for i, o in zip(before, widths, strict=True)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), *blocks, *pool), torch.randn(64, 3, 32, 32)


NETWORKS = {"mlp": mlp, "lenet": lenet, "resnet20": resnet20}
VARIANTS = {
    "shared draw, Gaussian prior": (shared_draw, GaussianPrior()),
    "shared draw, mixture prior": (shared_draw, ScaleMixturePrior()),
    "flipout, Gaussian prior": (flipout, GaussianPrior()),
    "local reparameterisation, Gaussian prior": (local_reparameterisation, GaussianPrior()),
}


def step_of(net: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        if isinstance(net, MeanField):
            loss = loss + net.kl() / 60_000
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.network or NETWORKS:
        net, inputs = NETWORKS[name]()
        targets = torch.randint(10, (len(inputs),))
        steps = {"plain Adam": step_of(net, inputs, targets)}
        for variant, (estimator, prior) in VARIANTS.items():
            wrapped = MeanField(NETWORKS[name]()[0], prior, estimator)
            steps[variant] = step_of(wrapped, inputs, targets)
        times: dict[str, list[float]] = {variant: [] for variant in steps}
        for _ in range(arguments.rounds):
            for variant, step in steps.items():
                start = time.perf_counter()
                step()
                times[variant].append(time.perf_counter() - start)
        plain = statistics.median(times["plain Adam"])
        for variant in VARIANTS:
            print(f"{name:9} {variant:42} {statistics.median(times[variant]) / plain:.2f} × Adam")


if __name__ == "__main__":
    main()
