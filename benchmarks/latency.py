"""How long an answer takes: one input with 32 draws, and draws that share the work before the last layer.

Beside it, what ten snapshots of a network with a frozen body hold, in memory and in their file.

Every figure is a ratio of medians in turns. `Predictor` is measured against as many networks with weights of
their own, one after another, which have to be read from memory as its draws have; and against one pass. A
Bayesian last layer is measured against one pass through the network.

    python benchmarks/latency.py [--part NAME] [--seconds 10] [--threads 2] [--json results/latency.json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from steps import NETWORKS, Step, posterior_of, prediction_jobs, read, write
from timing import budgeted, progress, ratios
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.models import resnet50
from torchbayes.posterior.partial import digest_of_rest

DRAWS = 32
TITLES = {
    "mlp": "MLP 784-1200-1200-10",
    "lenet5": "LeNet-5",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
}


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a network and the shape of one input."""
    torch.manual_seed(0)
    if name == "resnet50":
        return resnet50(num_classes=10).eval(), (3, 224, 224)
    make, _, shape = NETWORKS[name]
    return make(1200).eval(), shape


def last_layer(model: nn.Module) -> tb.Posterior:
    """Return a posterior that holds the last layer's weights alone."""
    names = [name for name, _ in model.named_parameters()][-2:]
    mean = tb.snapshot(model, names)
    std = {name: torch.full_like(tensor, 0.01) for name, tensor in mean.items()}
    return tb.Gaussian(mean, std, rest=digest_of_rest(model, mean))


def plain(networks: list[nn.Module], inputs: Tensor) -> Step:
    """Return a job that runs networks one after another."""

    @torch.no_grad()
    def run() -> None:
        torch.stack([net(inputs) for net in networks]).softmax(2).mean(0)

    return run


def one_input(name: str) -> dict[str, Step]:
    """Answer one input with draws of all weights."""
    model, shape = network(name)
    inputs, q = torch.randn(1, *shape), posterior_of("Gaussian", model, DRAWS, shape)
    serve = tb.Predictor(model, q, DRAWS, recalibrate=False)
    return {
        "networks": plain(serve.networks, inputs),
        "one pass": plain([model], inputs),
        "Predictor": lambda: serve(inputs),
        "predictive": lambda: tb.predictive(model, q, inputs, DRAWS, recalibrate=False),
    }


def one_input_last_layer(name: str) -> dict[str, Step]:
    """Answer one input with draws of the last layer."""
    model, shape = network(name)
    inputs, q = torch.randn(1, *shape), last_layer(model)
    serve = tb.Predictor(model, q, DRAWS)
    return {
        "one pass": plain([model], inputs),
        "Predictor": lambda: serve(inputs),
        "predictive": lambda: tb.predictive(model, q, inputs, DRAWS),
    }


def many_last_layer(name: str) -> dict[str, Step]:
    """Predict 250 inputs with draws of the last layer."""
    model, shape = network(name)
    inputs, q = torch.randn(250, *shape), last_layer(model)
    return {
        "one pass": plain([model], inputs),
        "predictive": lambda: tb.predictive(model, q, inputs, DRAWS),
    }


def many(name: str) -> dict[str, Step]:
    """Predict 1,000 inputs with new draws of all weights."""
    model, shape = network(name)
    inputs, q = torch.randn(1000, *shape), posterior_of("Gaussian", model, DRAWS, shape)
    jobs = prediction_jobs(model, q, inputs, DRAWS)
    return {
        "as many passes": jobs["plain"],
        "predictive": jobs["ours"],
        "predictive, local": lambda: tb.predictive(
            model, q, inputs, DRAWS, recalibrate=False, local=True
        ),
    }


Part = tuple[Callable[[str], dict[str, Step]], str, tuple[str, ...], dict[str, float]]
# What is measured, relative to which job, on which networks, and the targets by job.
PARTS: dict[str, Part] = {
    "one input": (one_input, "networks", ("mlp", "lenet5", "resnet18"), {"Predictor": 1.2}),
    "one input, Bayesian last layer": (one_input_last_layer, "one pass", ("resnet18", "resnet50"), {}),
    "250 inputs, Bayesian last layer": (
        many_last_layer, "one pass", ("resnet18",), {"predictive": 1.3},
    ),
    "1,000 inputs, new draws": (
        many, "as many passes", ("mlp", "lenet5"), {"predictive": 1.0, "predictive, local": 1.0},
    ),
}  # fmt: skip


def measure(part: str, name: str, seconds: float) -> dict[str, Any]:
    """Measure a part on one network."""
    jobs, to, _, targets = PARTS[part]
    times = budgeted(jobs(name), seconds, least=5, most=60, warmup=2)
    rows: dict[str, Any] = dict(ratios(times, to))
    for job, row in rows.items():
        if job in targets:
            row["target"] = targets[job]
    found: dict[str, Any] = {"to": to, "rows": rows, "rounds": len(times[to])}
    if "one pass" in times and "Predictor" in times:
        middle = {job: statistics.median(times[job]) for job in ("one pass", "Predictor")}
        found["more_ms"] = round(1000 * (middle["Predictor"] - middle["one pass"]), 2)
    shown = ", ".join(f"{job} {row['ratio']:.2f}" for job, row in rows.items())
    progress(f"{part}, {TITLES[name]}, relative to {to}: {shown}")
    return found


SNAPSHOTS = "ten snapshots of a frozen body"


def resident() -> float:
    """MB of this process in memory; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    return int(status.read_text(encoding="utf-8").split("VmRSS:")[1].split()[0]) / 1024


def snapshots(name: str, count: int = 10) -> dict[str, Any]:
    """Measure snapshots of a network of which only the last layer varies."""
    model, _ = network(name)
    model.requires_grad_(False)
    head = list(model.parameters())[-2:]
    for weight in head:
        weight.requires_grad_(True)
    before, held = resident(), tb.Samples(model)
    for _ in range(count):
        with torch.no_grad():
            for weight in head:
                weight.add_(0.01 * torch.randn_like(weight))
        held.append()
    grown = resident() - before
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "snapshots.safetensors"
        held.save(file)
        on_disk = file.stat().st_size / 2**20
    in_memory = sum(t.nbytes for i in range(count) for t in held[i].values()) / 2**20
    body = sum(t.nbytes for t in model.state_dict().values()) / 2**20
    sizes = {"network": body, "held": in_memory, "process": grown, "file": on_disk}
    found = {key: round(size, 2) for key, size in sizes.items()}
    shown = ", ".join(f"{key} {size} MB" for key, size in found.items())
    progress(f"{SNAPSHOTS}, {TITLES[name]}: {shown}")
    return {"count": count, "megabytes": found}


def main() -> None:
    """Measure what was asked for and add it to the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=[*PARTS, SNAPSHOTS], action="append")
    parser.add_argument("--seconds", type=float, default=10, help="for a part on one network")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stored = read(arguments.json, {"parts": {}})
    asked = [SNAPSHOTS, *PARTS] if arguments.part is None else arguments.part
    if SNAPSHOTS in asked:  # first: later this process has memory to spare
        stored["snapshots"] = {"resnet50": snapshots("resnet50")}
        write(arguments.json, stored, arguments.threads)
    for part in (part for part in asked if part != SNAPSHOTS):
        place = stored["parts"].setdefault(part, {})
        for name in PARTS[part][2]:
            place[name] = measure(part, name, arguments.seconds)
            write(arguments.json, stored, arguments.threads)


if __name__ == "__main__":
    main()
