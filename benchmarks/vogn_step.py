"""The time of one VOGN, OGN and IVON step relative to a plain Adam step on the same network.

All of them take turns, so that what else the machine does falls on all alike; the ratios are of medians.
Plain Adam is torch's fused one. Prints peak memory too, where asked: each optimiser then has a process of
its own.

    python benchmarks/vogn_step.py [--rounds 20] [--threads 2] [--network lenet5] [--memory]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved, ratios, show
from torch import Tensor, nn

from torchbayes.models import lenet5, mlp, resnet18, resnet20
from torchbayes.optim.ivon import IVON
from torchbayes.optim.ogn import OGN
from torchbayes.optim.vogn import VOGN

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(784, hidden=(1200, 1200)), (128, 784)),
    "lenet5": (lenet5, (128, 3, 32, 32)),
    "resnet20": (lambda: resnet20(batch_norm=False), (64, 3, 32, 32)),
    "resnet18": (lambda: resnet18(stem="cifar"), (32, 3, 32, 32)),
}
TARGETS = {
    "VOGN": {"mlp": 1.8, "lenet5": 1.5, "resnet20": 1.25, "resnet18": 1.6},
    "IVON": {"mlp": 1.8, "lenet5": 1.05, "resnet20": 1.03, "resnet18": 1.1},
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda net: torch.optim.Adam(net.parameters(), fused=True),
    "VOGN": lambda net: VOGN(net, 1e-4, train_size=50_000, prior_precision=50.0),
    "OGN": lambda net: OGN(net, 1e-4, train_size=50_000, prior_precision=50.0),
    "IVON": lambda net: IVON(net, 0.1, train_size=50_000, prior_precision=10.0),
}


def step_of(network: str, optimizer_name: str) -> Callable[[], None]:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    net = make()
    inputs, targets = torch.randn(shape), torch.randint(10, shape[:1])
    optimizer = OPTIMIZERS[optimizer_name](net)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def peak_memory(network: str, name: str) -> float:
    """The peak resident size in MB of a process that takes three steps, less that of importing torch."""
    code = (
        "import resource, runpy, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"space = runpy.run_path({__file__!r})\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"step = space['step_of']({network!r}, {name!r})\n"
        "for _ in range(3): step()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = OPTIMIZERS if arguments.optimizer is None else arguments.optimizer
    names = ["Adam", *(name for name in chosen if name != "Adam")]
    for network in NETWORKS if arguments.network is None else arguments.network:
        jobs = {name: step_of(network, name) for name in names}
        table = ratios(interleaved(jobs, rounds=arguments.rounds), to="Adam")
        for name in names[1:]:
            target = TARGETS.get(name, {}).get(network)
            label = name if target is None else f"{name} (target {target})"
            if arguments.memory:
                share = peak_memory(network, name) / peak_memory(network, "Adam")
                label += f", memory {share:.2f} ×"
            table[label] = table.pop(name)
        show(f"{network}: one step relative to fused Adam", table)


if __name__ == "__main__":
    main()
