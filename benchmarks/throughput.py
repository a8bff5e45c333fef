"""What `memory_format="auto"` and bfloat16 save in `fit`: processor time of a step, relative to plain `fit`.

Run: python benchmarks/throughput.py [--threads 2] [--rounds 4] --json results/throughput.json
Random images of 3×32×32, MAP; the ways take turns. What `"auto"` spends on choosing is outside
the steps and printed beside them, in steps of plain `fit`. Processor time, so that other programs on the
machine count as little as possible.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from steps import read, write
from timing import progress, ratios, show

import torchbayes as tb
from torchbayes.models import build_model
from torchbayes.train.progress import NoProgress

NETWORKS: dict[str, tuple[dict[str, Any], int]] = {
    # name: its options, and the examples per update
    "resnetpp8": ({"width": 8}, 128),
    "wrn-16-4": ({}, 16),
}
TARGETS = {("resnetpp8", "auto"): 0.6, ("wrn-16-4", "auto, bfloat16"): 0.55}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto": {"memory_format": "auto"},
    "auto, bfloat16": {"memory_format": "auto", "amp": "bfloat16"},
}
STEPS = 4


class Clock(NoProgress):
    """Notes the processor time of every step."""

    def start(self, name: str, total: int, done: int) -> None:
        """The first step begins."""
        self.began = time.process_time()
        self.steps: list[float] = []

    def advance(self, loss: float) -> None:
        """A step has ended."""
        now = time.process_time()
        self.steps.append(now - self.began)
        self.began = now


def measured(name: str, rounds: int) -> dict[str, Any]:
    """The ratios of a network's ways, and what they chose."""
    options, size = NETWORKS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * size, 3, 32, 32, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    chosen: dict[str, list[str | None]] = {way: [] for way in WAYS}
    choosing: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 1):  # the first warms up
        for way, how in WAYS.items():
            torch.manual_seed(0)
            model = build_model(name, input_shape=(3, 32, 32), num_classes=10, **options)
            clock, began = Clock(), time.process_time()
            run = tb.fit(
                model,
                (x, y),
                "map",
                epochs=1,
                batch_size=size,
                progress=clock,
                in_place=True,
                **how,
            )
            whole = time.process_time() - began
            if round_:
                seconds[way] += clock.steps
                choosing[way].append(whole - sum(clock.steps))
                chosen[way].append(run.settings["chosen_format"])
        progress(f"{name}: round {round_} of {rounds}")
    table = ratios(seconds, "plain")
    step = sorted(seconds["plain"])[len(seconds["plain"]) // 2]
    for way, row in table.items():
        extra = min(choosing[way]) - min(choosing["plain"])
        row["choosing_in_steps"] = round(max(0.0, extra) / step, 2)
        if (name, way) in TARGETS:
            row["target"] = TARGETS[name, way]
    show(f"{name}, batch {size}, relative to plain fit", table)
    return {"batch": size, "options": options, "ratios": table, "chosen": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    stored = read(given.json, {"networks": {}})
    for name in NETWORKS if given.network is None else given.network:
        stored["networks"][name] = measured(name, given.rounds)
        write(given.json, stored, given.threads)


if __name__ == "__main__":
    main()
