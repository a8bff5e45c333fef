"""The time of one step of K-FAC and Noisy K-FAC on timm's `resnet10t`, relative to Adam's.

All take turns in one run, in processor time and from the same weights; every step has new labels. Steps come
in whole cycles of `refresh_every`, after one that does not count. The mean has the decompositions' share in
it; all figures are relative to Adam's median. Two solutions per factor and step cost the same whatever the
batch, so the batch and the images' size stand with every figure: 32 images of 224×224 are what each GPU had
in the VOGN paper, whose figures are 3.0 and 4.0. Needs timm.

    python benchmarks/kfac_step.py [--batch 32 --size 64] [--cycles 2] [--threads 2] [--json FILE]

With --json the figures are added to what FILE has; `make records` puts them into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from steps import read, write
from timing import progress

import torchbayes as tb

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.world.torchvision_stub import import_timm

TRAIN_SIZE, CLASSES, CYCLE = 50_000, 10, 10
PLANNED = {"train_size": TRAIN_SIZE, "steps": 10_000}
RARELY = {"statistics_every": CYCLE}
OPTIMISERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda net: torch.optim.Adam(net.parameters()),
    "K-FAC": lambda net: tb.KFAC(net, **PLANNED),
    "K-FAC, statistics_every=10": lambda net: tb.KFAC(net, **PLANNED, **RARELY),
    "Noisy K-FAC": lambda net: tb.NoisyKFAC(net, **PLANNED),
    "Noisy K-FAC, statistics_every=10": lambda net: tb.NoisyKFAC(net, **PLANNED, **RARELY),
}
CASES = ((32, 64), (128, 64), (32, 224))


def step_of(name: str, batch: int, size: int) -> Callable[[], None]:
    """Make a step of one of them."""
    torch.manual_seed(0)
    net = import_timm().create_model("resnet10t", num_classes=CLASSES)
    optimizer = OPTIMISERS[name](net)
    inputs = torch.randn(batch, 3, size, size)

    def step() -> None:
        targets = torch.randint(CLASSES, (batch,))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


def measured(batch: int, size: int, cycles: int) -> dict[str, Any]:
    """Every optimiser's steps on images of one size."""
    steps = {name: step_of(name, batch, size) for name in OPTIMISERS}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(CYCLE * (cycles + 1)):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if count >= CYCLE:
                seconds[name].append(time.process_time() - start)
    base = statistics.median(seconds["Adam"])
    found = {
        name: {
            "mean": round(statistics.mean(values) / base, 2),
            "median": round(statistics.median(values) / base, 2),
            "longest": round(max(values) / base, 2),
        }
        for name, values in seconds.items()
    }
    return {"batch": batch, "size": size, "cycles": cycles, "steps": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for option, default in (("batch", None), ("size", None), ("cycles", 2), ("threads", 2)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    cases = CASES
    if given.batch is not None or given.size is not None:
        cases = ((given.batch or CASES[0][0], given.size or CASES[0][1]),)
    stored = read(given.json, {"cases": {}})
    for batch, size in cases:
        title = f"{batch} images of {size}×{size}"
        found = measured(batch, size, given.cycles)
        progress(f"resnet10t, {title}, relative to Adam's median step")
        for name, row in found["steps"].items():
            print(f"  {name:34s}", *(f"{kind} {value:5.2f}" for kind, value in row.items()))
        stored["cases"][title] = found
        write(given.json, stored, given.threads)


if __name__ == "__main__":
    main()
