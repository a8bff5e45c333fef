"""The time of one hypernetwork step relative to a plain SGD-with-momentum step on the same network.

All variants take turns, so that what else the machine does falls on all of them alike; the ratios are of
medians of processor time. Both sides use torch's fused SGD with Nesterov momentum and weight decay; "plain
gradient" is the same hypernetwork under `torch.optim.SGD`, which makes the gradient of W2 in full. Prints
peak memory too, where asked, as a multiple of the generators' weights: each variant then has a process of
its own.

    python benchmarks/hypernet_step.py [--rounds 20] [--threads 2] [--network mlp] [--memory] [--json FILE]

With --json the figures are added to what FILE has; `make records` puts them into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from steps import read, write
from timing import interleaved, ratios, show
from torch import nn

from torchbayes.models import lenet5, mlp, wide_resnet
from torchbayes.variational import Hypernet, HypernetSGD

# Network, batch, and the layers to generate: all but the last where there are no residual blocks.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str] | None]] = {
    "mlp": (lambda: mlp(784, hidden=(1200, 1200)), (128, 784), None),
    "wrn-16-2": (lambda: wide_resnet(16, 2), (64, 3, 32, 32), None),
    "lenet5": (lenet5, (128, 3, 32, 32), ["conv1", "conv2", "fc1", "fc2"]),
    "wrn-28-4": (lambda: wide_resnet(28, 4), (16, 3, 32, 32), None),
}
TARGETS = {"mlp": 4.0, "wrn-16-2": 1.15, "lenet5": 1.25}
MEMORY_TARGETS = {"wrn-28-4": 4.0}
VARIANTS = ("SGD", "HypernetSGD", "plain gradient")
LATENT = 32
TRAIN_SIZE = 50_000


def step_of(network: str, variant: str) -> tuple[Callable[[], None], float]:
    """A step, and the MB of the generators' weights."""
    make, shape, layers = NETWORKS[network]
    torch.manual_seed(0)
    net = make()
    settings: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "nesterov": True}
    decay = 5e-4
    size = 0.0
    if variant != "SGD":
        net = Hypernet(net, latent_dim=LATENT, hidden_dim=LATENT, layers=layers)
        generators = [*net.first.parameters(), *net.second.parameters()]
        size = sum(p.numel() * p.element_size() for p in generators) / 2**20
    optimizer: torch.optim.Optimizer = (
        HypernetSGD(net, train_size=TRAIN_SIZE, prior=decay * TRAIN_SIZE, **settings)
        if isinstance(net, Hypernet) and variant == "HypernetSGD"
        else torch.optim.SGD(net.parameters(), fused=True, weight_decay=decay, **settings)
    )
    inputs, targets = torch.randn(shape), torch.randint(10, shape[:1])

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

    return step, size


def peak_memory(network: str, variant: str) -> tuple[float, float]:
    """Peak MB of a process that takes three steps, less that of importing torch; the generators' MB."""
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"space = runpy.run_path({__file__!r})\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        f"step, size = space['step_of']({network!r}, {variant!r})\n"
        "for _ in range(3): step()\n"
        "print(peak() - before, size)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak, size = done.stdout.split()[-2:]
    return int(peak) / 1024, float(size)


def measured(network: str, rounds: int, memory: bool) -> dict[str, Any]:
    """The ratios of a network's variants, with targets and, where asked for, memory."""
    jobs = {variant: step_of(network, variant)[0] for variant in VARIANTS}
    seconds = interleaved(jobs, rounds=rounds, clock=time.process_time)
    table: dict[str, Any] = ratios(seconds, to="SGD")
    for variant in VARIANTS[1:] if memory else ():
        peak, size = peak_memory(network, variant)
        table[variant] |= {"memory": round(peak / size, 2), "generators_mb": round(size)}
    if network in TARGETS:
        table["HypernetSGD"]["target"] = TARGETS[network]
    if network in MEMORY_TARGETS:
        table["HypernetSGD"]["memory_target"] = MEMORY_TARGETS[network]
    return {"batch": NETWORKS[network][1][0], "rounds": rounds, "rows": table}


def _label(variant: str, row: dict[str, Any]) -> str:
    label = variant + (f" (target {row['target']})" if "target" in row else "")
    if "memory" in row:
        label += f", memory {row['memory']:.2f} × {row['generators_mb']} MB"
        if "memory_target" in row:
            label += f" (target {row['memory_target']})"
    return label


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stored = read(arguments.json, {"networks": {}})
    for network in NETWORKS if arguments.network is None else arguments.network:
        found = measured(network, arguments.rounds, arguments.memory)
        shown = {_label(variant, row): row for variant, row in found["rows"].items()}
        show(f"{network}: one step relative to fused SGD", shown)
        stored["networks"][network] = found
        write(arguments.json, stored, arguments.threads)


if __name__ == "__main__":
    main()
