"""The time of a step of ResNet with batch norm, relative to that of ResNet++ (ATMC, section 5).

The two have the same convolutions; ResNet++ has weight norm and SELU in place of batch norm and ReLU. Both
take fused SGD's step in turns in one run, in processor time, with new labels at every step. ResNet++56 of
width 32 with batches of 128 is the paper's choice for CIFAR-10.

Run: python benchmarks/batch_norm.py [--rounds 15] [--json results/batch-norm.json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved, progress, ratios
from torch import nn

from torchbayes.core.storage import write_text
from torchbayes.experiments.provenance import provenance
from torchbayes.models import build_model

# The ResNet++, the ResNet, their width, and the images of a batch.
PAIRS = {
    "resnetpp20": ("resnet20", 16, 128),
    "resnetpp56": ("resnet56", 32, 128),
}
CLASSES = 10
WITH = "batch norm"


def step_of(net: nn.Module, batch: int) -> Callable[[], None]:
    """Make a step of fused SGD."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)
    inputs, targets = torch.randn(batch, 3, 32, 32), torch.randint(CLASSES, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        targets.random_(CLASSES)
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    networks = {}
    for name, (plain, width, batch) in PAIRS.items():
        jobs = {
            name: step_of(
                build_model(name, input_shape=(3, 32, 32), num_classes=CLASSES, width=width), batch
            ),
            WITH: step_of(
                build_model(plain, input_shape=(3, 32, 32), num_classes=CLASSES, width=width), batch
            ),
        }
        row = ratios(
            interleaved(jobs, rounds=arguments.rounds, warmup=2, clock=time.process_time), name
        )[WITH]
        progress(f"{plain} with batch norm / {name}: {row}")
        networks[name] = {
            "batch": batch, "width": width,
            "steps": {WITH: {**row, "to": name, "rounds": arguments.rounds}},
        }  # fmt: skip
    if arguments.json is not None:
        found = {"networks": networks, "threads": arguments.threads, **provenance()}
        write_text(arguments.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
