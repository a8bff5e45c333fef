"""The time of one step of each sampler relative to one of SGD with momentum on the same network.

All of them take turns, so that what else the machine does falls on all alike; the ratios are of medians.
Plain SGD is torch's fused one, which is the harder comparison.

    python benchmarks/sampler_step.py [--rounds 30] [--threads 2] [--network mlp] [--cpu-time]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from torchbayes.models import lenet5, mlp, resnet20
from torchbayes.optim import ATMC, PSGLD, SGHMC, SGLD, SGNHT

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(784, hidden=(1200, 1200)), (128, 784)),
    "lenet5": (lenet5, (128, 3, 32, 32)),
    "resnet20": (lambda: resnet20(batch_norm=False), (64, 3, 32, 32)),
}
TARGETS = {
    "SGLD": {"mlp": 1.5, "lenet5": 1.05, "resnet20": 1.03},
    "SGNHT": {"mlp": 1.8, "lenet5": 1.08, "resnet20": 1.05},
    "ATMC": {"mlp": 1.8, "lenet5": 1.08, "resnet20": 1.05},
}
N = 50_000
PLAIN = "SGD"
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    PLAIN: lambda net: torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True),
    "SGLD": lambda net: SGLD(net, 1e-7, train_size=N),
    "PSGLD": lambda net: PSGLD(net, 1e-8, train_size=N),
    "SGHMC": lambda net: SGHMC(net, train_size=N, average_step=1e-4),
    "SGNHT one thermostat": lambda net: SGNHT(
        net, train_size=N, average_step=1e-4, per_parameter=False
    ),
    "SGNHT": lambda net: SGNHT(net, train_size=N, average_step=1e-4),
    "ATMC Gaussian": lambda net: ATMC(net, train_size=N, average_step=1e-4, max_step=math.inf),
    "ATMC": lambda net: ATMC(net, train_size=N, average_step=1e-4),
}


def step_of(network: str, name: str) -> Callable[[], None]:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    net = make()
    inputs, targets = torch.randn(shape), torch.randint(10, shape[:1])
    optimizer = OPTIMIZERS[name](net)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

    return step


def measure(network: str, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The median time of a step of each, in turns."""
    steps = {name: step_of(network, name) for name in OPTIMIZERS}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(rounds + 3):
        for name, step in steps.items():
            start = clock()
            step()
            if count >= 3:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="for a busy machine; only meaningful with --threads 1",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    for network in arguments.network or NETWORKS:
        medians = measure(network, arguments.rounds, clock)
        for name in list(OPTIMIZERS)[1:]:
            target = TARGETS.get(name.split()[0], {}).get(network)
            goal = "" if target is None else f"  (target {target})"
            print(
                f"{network:9} {name:21} {medians[name] / medians[PLAIN]:.2f} × SGD{goal}",
                flush=True,
            )


if __name__ == "__main__":
    main()
