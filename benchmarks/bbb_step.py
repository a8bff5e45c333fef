"""The time of one Bayes by Backprop step relative to a plain Adam step on the same network.

All variants take turns, so that what else the machine does falls on all of them alike; the ratios are of
medians. Both sides use torch's fused Adam, the harder comparison; the same step with Adam as torch has it
by default is shown beside it. Prints peak memory too, where asked: each variant then has a process of its
own.

    python benchmarks/bbb_step.py [--rounds 40] [--threads 2] [--network mlp] [--variant flipout] [--memory]
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
from torch import nn

from torchbayes.models import lenet5, mlp, resnet20
from torchbayes.prior import GaussianPrior, ScaleMixturePrior
from torchbayes.variational import MeanField, flipout, local_reparameterisation, shared_draw

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(784, hidden=(1200, 1200)), (128, 784)),
    "lenet5": (lenet5, (128, 3, 32, 32)),
    "resnet20": (lambda: resnet20(batch_norm=False), (64, 3, 32, 32)),
}
TARGETS = {
    "shared draw": {"mlp": 2.0, "lenet5": 1.15, "resnet20": 1.08},
    "flipout": {"mlp": 3.0, "lenet5": 2.0, "resnet20": 2.1},
}
VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "Adam": lambda net: net,
    "Adam, not fused": lambda net: net,
    "shared draw": lambda net: MeanField(net, GaussianPrior(), shared_draw),
    "shared draw, mixture prior": lambda net: MeanField(net, ScaleMixturePrior(), shared_draw),
    "flipout": lambda net: MeanField(net, GaussianPrior(), flipout),
    "local reparameterisation": lambda net: MeanField(
        net, GaussianPrior(), local_reparameterisation
    ),
}


def step_of(network: str, variant: str) -> Callable[[], None]:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    net = VARIANTS[variant](make())
    inputs, targets = torch.randn(shape), torch.randint(10, shape[:1])
    fused = None if variant == "Adam, not fused" else True
    optimizer = torch.optim.Adam(net.parameters(), fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        if isinstance(net, MeanField):
            loss = loss + net.kl() / 60_000
        loss.backward()
        optimizer.step()

    return step


def peak_memory(network: str, variant: str) -> float:
    """The peak memory in MB of a process that takes three steps, less that of importing torch (Linux)."""
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"space = runpy.run_path({__file__!r})\n"
        # Not getrusage's: a child begins with its parent's peak.
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        f"step = space['step_of']({network!r}, {variant!r})\n"
        "for _ in range(3): step()\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--variant", choices=VARIANTS, action="append")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = VARIANTS if arguments.variant is None else arguments.variant
    variants = ["Adam", *(name for name in chosen if name != "Adam")]
    for network in NETWORKS if arguments.network is None else arguments.network:
        jobs = {name: step_of(network, name) for name in variants}
        table = ratios(interleaved(jobs, rounds=arguments.rounds), to="Adam")
        for name in variants[1:]:
            target = TARGETS.get(name, {}).get(network)
            label = name if target is None else f"{name} (target {target})"
            if arguments.memory:
                share = peak_memory(network, name) / peak_memory(network, "Adam")
                label += f", memory {share:.2f} ×"
            table[label] = table.pop(name)
        show(f"{network}: one step relative to fused Adam", table)


if __name__ == "__main__":
    main()
