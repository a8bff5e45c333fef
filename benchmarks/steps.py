"""Step time, peak memory and prediction time of every method, relative to plain torch on the same network.

Each variant and its baseline take turns (A, B, A, B, …), so that what else the machine does falls on both
alike; ratios are of medians, with quartiles. Plain Adam and SGD (momentum 0.9) are torch's as a user gets
them; their fused forms, and the bare forward and backward pass that nothing can go below, stand beside
them. A method is measured as `fit` drives it. K-FAC and noisy K-FAC invert their factors every tenth step:
for them rounds come in tens and the ratio is of means, which has the inversion's share in it. Peak memory is
that of a process of its own. Labels are drawn anew at every step: a batch that is learned by heart leaves
gradients whose squares are denormal numbers, which some processors are slow with.

    python benchmarks/steps.py [--network mlp] [--method vogn] [--seconds 3] [--memory] [--predict]
                               [--threads 2] [--json FILE]

With --json the figures are added to what FILE has; `make records` writes docs/benchmarks.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import budgeted, progress, ratios
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.core.noise import normals_
from torchbayes.core.storage import write_text
from torchbayes.experiments.provenance import provenance
from torchbayes.models import lenet5, mlp, resnet18, resnet20
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.train.method import Method, Plan
from torchbayes.train.registry import METHODS, method_options

Step = Callable[[], Any]
CLASSES = 10
NETWORKS: dict[str, tuple[Callable[[int], nn.Module], int, tuple[int, ...]]] = {
    # name: (the network of a width, the batch, one input's shape)
    "mlp": (lambda width: mlp(784, hidden=(width, width)), 128, (784,)),
    "lenet5": (lambda _: lenet5(), 128, (3, 32, 32)),
    "resnet20": (lambda _: resnet20(batch_norm=False), 64, (3, 32, 32)),
    "resnet18": (lambda _: resnet18(stem="cifar"), 32, (3, 32, 32)),
}
# The least rounds of a pair. Steps that take long vary little, so fewer of them do.
LEAST = {"mlp": 8, "lenet5": 8, "resnet20": 8, "resnet18": 5}
NORMALS = "a normal number per weight"
BARE = ("forward and backward", "Adam", "Adam, fused", "SGD", "SGD, fused", NORMALS)
CHAIN = "a chain's samples"  # the family of the samplers
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    "bbb flipout": ("bbb", {"estimator": tb.flipout}),
    "bbb local": ("bbb", {"estimator": tb.local_reparameterisation}),
    "bbb mixture prior": ("bbb", {"prior": tb.ScaleMixturePrior()}),
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
# Draws and inputs of the prediction. A ResNet's 32 draws of 1,000 images take minutes, and the ratio of two
# jobs with the same number of passes is that of fewer of them.
PREDICTIONS = {
    "mlp": (32, 1000),
    "lenet5": (32, 1000),
    "resnet20": (4, 250),
    "resnet18": (1, 250),
}


def baseline(name: str) -> str:
    """Name the plain optimiser that a variant is compared with: the one that its update adds to."""
    kind = VARIANTS[name][0]
    return "SGD" if kind == "hypernet" or METHODS[kind].family == CHAIN else "Adam"


def cycle(name: str) -> int:
    """Count the steps after which a variant has taken every kind of step that it takes."""
    refresh = method_options(METHODS[VARIANTS[name][0]]).get("refresh_every")
    return 1 if refresh is None else int(refresh.default)


def bare(name: str, net: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """Make a step of plain torch, or only the random numbers that a method with noise cannot do without."""
    if name == NORMALS:
        kept, generator = [torch.empty_like(p) for p in net.parameters()], torch.Generator()
        return lambda: normals_(kept, generator)
    fused = True if name.endswith("fused") else None
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=fused)
        if name.startswith("SGD")
        else torch.optim.Adam(net.parameters(), fused=fused)
    )

    def step() -> None:
        optimizer.zero_grad()
        targets.random_(CLASSES)
        F.cross_entropy(net(inputs), targets).backward()
        if name != BARE[0]:
            optimizer.step()

    return step


def make_method(name: str, net: nn.Module, draws: int = 1) -> Method:
    """Make a variant's method on a network, as `fit` does."""
    kind, options = VARIANTS[name]
    if draws > 1 and "mc_samples" in method_options(METHODS[kind]):
        options = {**options, "mc_samples": draws}
    plan = Plan(50_000, 10, 390, torch.Generator().manual_seed(0), lambda: net)
    made = METHODS[kind](net, tb.Categorical(), plan, **options)
    made.begin_epoch(0)
    return made


def method_step(made: Method, inputs: Tensor, targets: Tensor) -> Step:
    """Make a step of a method as `fit` takes it."""

    def closure() -> Tensor:
        made.optimizer.zero_grad()
        targets.random_(CLASSES)
        loss = made.loss(inputs, targets)
        with sending():
            loss.backward()
        return loss

    optimizer = made.optimizer
    sending = optimizer.sent_early if isinstance(optimizer, WeightOptimizer) else nullcontext
    return lambda: made.step(closure)


def problem(network: str, batch: int = 0, width: int = 1200) -> tuple[nn.Module, Tensor, Tensor]:
    """Make a network and a batch of random data."""
    make, usual, shape = NETWORKS[network]
    torch.manual_seed(0)
    size = batch if batch else usual
    return make(width), torch.randn(size, *shape), torch.randint(CLASSES, (size,))


def step_of(network: str, name: str, batch: int = 0, width: int = 1200, draws: int = 1) -> Step:
    """Make the step of a variant on a network, with random data."""
    net, inputs, targets = problem(network, batch, width)
    if name in BARE:
        return bare(name, net, inputs, targets)
    return method_step(make_method(name, net, draws), inputs, targets)


def why(error: BaseException) -> str:
    """Shorten an exception to one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def peak_memories(cases: Sequence[tuple[str, str]], threads: int) -> list[float]:
    """Measure the peak memory in MB that three steps of a variant on a network add to a process (Linux).

    One process imports torch and never computes anything; each case is a fork of it.
    """
    command = [sys.executable, __file__, "--peak", json.dumps(list(cases)), "--threads", threads]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    )
    return [float(line) for line in done.stdout.split()]


def _print_peaks(cases: Sequence[tuple[str, str]]) -> None:
    def status(key: str) -> int:
        return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])

    from torchbayes.kernels.loops import LOOPS

    for loop in LOOPS.values():  # loading numba and what it has compiled is not a step's memory
        _ = loop.walk

    for network, name in cases:
        child = os.fork()
        if child == 0:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = status("VmRSS")
            peak = float("nan")
            try:
                step = step_of(network, name)
                for _ in range(3):
                    step()
                peak = (status("VmHWM") - before) / 1024
            finally:
                print(peak, flush=True)
                os._exit(0)
        os.waitpid(child, 0)


def posterior_of(kind: str, model: nn.Module, draws: int, shape: tuple[int, ...]) -> tb.Posterior:
    """Make a posterior of a kind with arbitrary weights, on which the time does not depend."""
    mean = tb.snapshot(model)
    std = {name: torch.full_like(p, 0.01) for name, p in model.named_parameters()}
    if kind == "Samples":
        samples = tb.Samples(model)
        for _ in range(draws):
            samples.append()
        return samples
    if kind == "Gaussian":
        return tb.Gaussian(mean, std)
    if kind == "LowRankGaussian":
        factors = {name: torch.randn(20, *p.shape) * 1e-3 for name, p in std.items()}
        return tb.LowRankGaussian(mean, std, factors)
    # Of a method whose posterior comes from a pass after training there is none after a step.
    name = next(
        name
        for name, method in METHODS.items()
        if method.posterior_kind == kind and name != "laplace"
    )
    made = make_method(name, model)
    method_step(made, torch.randn(8, *shape), torch.randint(CLASSES, (8,)))()
    return made.posterior()


def prediction_jobs(
    model: nn.Module, posterior: tb.Posterior, inputs: Tensor, draws: int
) -> dict[str, Step]:
    """Pair a prediction, `ours`, with as many `plain` forward passes."""

    @torch.no_grad()
    def plain() -> None:
        for _ in range(draws):
            model(inputs).softmax(1)

    return {"plain": plain, "ours": lambda: tb.predictive(model, posterior, inputs, draws)}


def prediction(network: str, seconds: float) -> dict[str, Any]:
    """Measure predictions relative to as many plain forward passes, for each kind of posterior."""
    make, _, shape = NETWORKS[network]
    draws, count = PREDICTIONS[network]
    found: dict[str, Any] = {"draws": draws, "inputs": count, "rows": {}}
    # What a prediction costs depends on the kind of posterior alone; a `Point` is one plain forward pass.
    for kind in sorted({method.posterior_kind for method in METHODS.values()} - {"Point"}):
        torch.manual_seed(0)
        model, inputs = make(1200), torch.randn(count, *shape)
        try:
            posterior = posterior_of(kind, model, draws, shape)
            jobs = prediction_jobs(model.eval(), posterior, inputs, draws)
            times = budgeted(jobs, seconds, least=3, most=10, warmup=1)
            found["rows"][kind] = ratios(times, "plain")["ours"]
            progress(f"{network}: prediction, {kind}: {found['rows'][kind]['ratio']:.2f}")
        except Exception as error:  # a kind that cannot take a network is a row, not an end
            found["rows"][kind] = {"error": why(error)}
            progress(f"{network}: prediction, {kind}: {why(error)}")
    return found


def measure(network: str, names: Iterable[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the step times of a network."""
    found: dict[str, Any] = {}
    limits = {"seconds": arguments.seconds, "least": LEAST[network]}
    plain = budgeted({name: step_of(network, name) for name in BARE}, **limits)
    for name, row in ratios(plain, "Adam").items():
        found[name] = row | {"to": "Adam", "rounds": len(plain[name])}
    progress(f"{network}: floor {found[BARE[0]]['ratio']:.2f} of Adam")
    for name in names:
        # With its baseline alone: a dozen large networks in turns would push each other out of the cache.
        to = baseline(name)
        try:
            jobs = {other: step_of(network, other) for other in (to, name)}
            times = budgeted(jobs, **limits, cycle=cycle(name))
            row = ratios(times, to, mean=cycle(name) > 1)[name] | {"rounds": len(times[name])}
            progress(f"{network}: {name} {row['ratio']:.2f} of {to}")
        except Exception as error:
            row = {"error": why(error)}
            progress(f"{network}: {name}: {row['error']}")
        found[name] = row | {"to": to, "target": TARGETS.get(name, {}).get(network)}
    return found


def add_memory(network: str, names: Sequence[str], rows: dict[str, Any], threads: int) -> None:
    """Add every variant's peak memory, relative to its baseline's, to its row."""
    peaks = peak_memories([(network, name) for name in ("Adam", "SGD", *names)], threads)
    floor = dict(zip(("Adam", "SGD"), peaks, strict=False))
    for name, peak in zip(names, peaks[2:], strict=True):
        if peak == peak:  # not a number: the variant failed
            rows.setdefault(name, {"to": baseline(name)})
            rows[name]["memory"] = round(peak / floor[baseline(name)], 2)
    progress(f"{network}: memory")


def read(path: Path | None, empty: dict[str, Any]) -> dict[str, Any]:
    """Read a file of results."""
    if path is None or not path.exists():
        return empty
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stored


def write(path: Path | None, stored: dict[str, Any], threads: int) -> None:
    """Write results with what they were measured with."""
    if path is not None:
        stored |= provenance() | {"threads": threads}
        write_text(path, json.dumps(stored, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--method", choices=VARIANTS, action="append")
    parser.add_argument("--seconds", type=float, default=3, help="for a pair, as far as rounds do")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        return _print_peaks(arguments.peak)
    stored = read(arguments.json, {"networks": {}})
    names = list(VARIANTS) if arguments.method is None else arguments.method
    for network in NETWORKS if arguments.network is None else arguments.network:
        place = stored["networks"].setdefault(network, {})
        rows = place.setdefault("steps", {})
        rows.update(measure(network, names, arguments))
        if arguments.memory:
            add_memory(network, names, rows, arguments.threads)
        if arguments.predict:
            place["prediction"] = prediction(network, arguments.seconds)
        write(arguments.json, stored, arguments.threads)


if __name__ == "__main__":
    main()
