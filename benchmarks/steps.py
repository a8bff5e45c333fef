"""Every method's step time, peak memory and prediction time, relative to plain torch on the same network.

Each variant and its baseline take turns (A, B, A, B, …), so that what else the machine does falls on both
alike; ratios are of medians, with quartiles. Plain Adam and SGD (momentum 0.9) are torch's as a user gets
them; their fused forms, and the bare forward and backward pass that nothing can go below, stand beside
them. A method is measured as `fit` drives it. Peak memory is that of a process of its own.

    python benchmarks/steps.py [--network mlp] [--method vogn] [--rounds 15] [--memory] [--predict]
                               [--batch 128] [--width 1200] [--draws 1] [--threads 2] [--json FILE]

With --json the figures are added to what FILE has; `python benchmarks/page.py` makes docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import interleaved, ratios, show
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.evidence.record import provenance
from torchbayes.methods import METHODS, method_options
from torchbayes.methods.base import Plan
from torchbayes.models import lenet5, mlp, resnet18, resnet20

Step = Callable[[], Any]
NETWORKS: dict[str, tuple[Callable[[int], nn.Module], int, tuple[int, ...]]] = {
    # name: (the network of a width, the batch, one input's shape)
    "mlp": (lambda width: mlp(784, hidden=(width, width)), 128, (784,)),
    "lenet5": (lambda _: lenet5(), 128, (3, 32, 32)),
    "resnet20": (lambda _: resnet20(batch_norm=False), 64, (3, 32, 32)),
    "resnet18": (lambda _: resnet18(stem="cifar"), 32, (3, 32, 32)),
}
BARE = ("forward and backward", "Adam", "Adam, fused", "SGD", "SGD, fused")
TO_SGD = {
    "sgld",
    "psgld",
    "sghmc",
    "sgnht",
    "atmc",
    "hypernet",
}  # the others are compared with Adam
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS if name != "ensemble"},  # whose step is map's
    "bbb flipout": ("bbb", {"estimator": "flipout"}),
    "bbb local": ("bbb", {"estimator": "local_reparameterisation"}),
    "bbb mixture prior": ("bbb", {"prior": "mixture"}),
}
TARGETS: dict[str, dict[str, float]] = {
    # of the issues; no entry, no target
    "bbb": {"mlp": 2.0, "lenet5": 1.15, "resnet20": 1.08, "resnet18": 1.15},
    "bbb flipout": {"mlp": 3.0, "lenet5": 2.0, "resnet20": 2.1, "resnet18": 2.1},
    "vogn": {"mlp": 1.8, "lenet5": 1.5, "resnet20": 1.25, "resnet18": 1.6},
    "ivon": {"mlp": 1.8, "lenet5": 1.05, "resnet20": 1.03, "resnet18": 1.1},
    "sgld": {"mlp": 1.5, "lenet5": 1.05, "resnet20": 1.03, "resnet18": 1.05},
    "sgnht": {"mlp": 1.8, "lenet5": 1.08, "resnet20": 1.05, "resnet18": 1.08},
    "atmc": {"mlp": 1.8, "lenet5": 1.08, "resnet20": 1.05, "resnet18": 1.08},
    "hypernet": {"mlp": 2.0, "lenet5": 1.25, "resnet20": 1.08},
}


def baseline(name: str) -> str:
    """What a variant is compared with."""
    return "SGD" if VARIANTS[name][0] in TO_SGD else "Adam"


def bare(name: str, net: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """A step without torchbayes."""
    fused = True if name.endswith("fused") else None
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=fused)
        if name.startswith("SGD")
        else torch.optim.Adam(net.parameters(), fused=fused)
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        if name != BARE[0]:
            optimizer.step()

    return step


def method(name: str, net: nn.Module, inputs: Tensor, targets: Tensor, draws: int) -> Step:
    """A step of a method as `fit` takes it."""
    kind, options = VARIANTS[name]
    if draws > 1 and "mc_samples" in method_options(METHODS[kind]):
        options = {**options, "mc_samples": draws}
    plan = Plan(50_000, 10, 390, torch.Generator().manual_seed(0), lambda: net)
    made = METHODS[kind](net, tb.Categorical(), plan, **options)
    made.begin_epoch(0)

    def closure() -> Tensor:
        made.optimizer.zero_grad()
        loss = made.loss(inputs, targets)
        loss.backward()
        return loss

    return lambda: made.step(closure)


def step_of(network: str, name: str, batch: int = 0, width: int = 1200, draws: int = 1) -> Step:
    """The step of a variant on a network, with random data."""
    make, usual, shape = NETWORKS[network]
    torch.manual_seed(0)
    size = batch if batch else usual
    net, inputs, targets = make(width), torch.randn(size, *shape), torch.randint(10, (size,))
    if name in BARE:
        return bare(name, net, inputs, targets)
    return method(name, net, inputs, targets, draws)


def peak_memory(network: str, name: str) -> float:
    """The peak memory in MB of a process that takes three steps, less that of importing torch (Linux)."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import steps\n"
        # Not getrusage's: a child begins with its parent's peak.
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        f"step = steps.step_of({network!r}, {name!r})\n"
        "for _ in range(3): step()\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) / 1024


def prediction(network: str, rounds: int, draws: int = 32, count: int = 1000) -> dict[str, Any]:
    """A prediction with 32 draws of 1,000 inputs relative to 32 plain forward passes of them."""
    make, _, shape = NETWORKS[network]
    torch.manual_seed(0)
    model, inputs = make(1200).eval(), torch.randn(count, *shape)
    samples = tb.Samples(model)
    for _ in range(draws):
        samples.append()
    std = {name: torch.full_like(p, 0.01) for name, p in model.named_parameters()}
    gaussian = tb.Gaussian(tb.snapshot(model), std)

    @torch.no_grad()
    def plain() -> None:
        for _ in range(draws):
            model(inputs).softmax(1)

    jobs: dict[str, Step] = {
        "plain forward passes": plain,
        "Samples": lambda: tb.predictive(model, samples, inputs, draws),
        "Gaussian": lambda: tb.predictive(model, gaussian, inputs, draws),
    }
    return ratios(interleaved(jobs, rounds=rounds, warmup=1), "plain forward passes")


def measure(network: str, names: Iterable[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of a network."""
    shape = (arguments.batch, arguments.width, arguments.draws)
    found: dict[str, Any] = {}
    plain = interleaved(
        {name: step_of(network, name, *shape) for name in BARE}, rounds=arguments.rounds
    )
    for name, row in ratios(plain, "Adam").items():
        found[name] = row | {"to": "Adam"}
    for name in names:
        # With its baseline alone: a dozen large networks in turns would push each other out of the cache.
        to = baseline(name)
        jobs = {other: step_of(network, other, *shape) for other in (to, name)}
        row = ratios(interleaved(jobs, rounds=arguments.rounds), to)[name]
        found[name] = row | {"to": to, "target": TARGETS.get(name, {}).get(network)}
    if arguments.memory:
        floor = {to: peak_memory(network, to) for to in ("Adam", "SGD")}
        for name in names:
            used = peak_memory(network, name)
            found[name] |= {"memory": round(used / floor[baseline(name)], 2)}
    show(
        f"{network}: one step relative to plain Adam (samplers and hypernet: plain SGD)",
        {_label(name, row): row for name, row in found.items()},
    )
    return found


def _label(name: str, row: dict[str, Any]) -> str:
    target = f" ≤ {row['target']}" if row.get("target") else ""
    memory = f", memory {row['memory']}" if "memory" in row else ""
    return f"{name}{target}{memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--method", choices=VARIANTS, action="append")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=0, help="the network's usual one if 0")
    parser.add_argument("--width", type=int, default=1200, help="of the MLP's hidden layers")
    parser.add_argument("--draws", type=int, default=1, help="per step, where a method has them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stored: dict[str, Any] = {"networks": {}}
    if arguments.json is not None and arguments.json.exists():
        stored = json.loads(arguments.json.read_text(encoding="utf-8"))
    for network in NETWORKS if arguments.network is None else arguments.network:
        place = stored["networks"].setdefault(network, {})
        names = list(VARIANTS) if arguments.method is None else arguments.method
        place.setdefault("steps", {}).update(measure(network, names, arguments))
        place["rounds"] = arguments.rounds
        if arguments.predict:
            place["prediction"] = prediction(network, max(3, arguments.rounds // 3))
            show(f"{network}: 32 draws of 1,000 inputs", place["prediction"])
    stored |= provenance() | {"threads": arguments.threads}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
