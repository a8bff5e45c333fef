"""How the cost of a step grows with batch, width, draws and processes, for a few methods.

The methods are one of each kind of work beside the forward and backward pass: `bbb` draws and differentiates
through every weight, `vogn` needs per-example squares, `ivon` draws and updates in place, `noisy-kfac` has
matrices per layer, `sgld` and `atmc` add noise, `hypernet` generates the weights. Batch, width and processes
are relative to the plain optimiser (Adam; samplers and hypernetwork: SGD), measured in turns with it at the
same setting; the draws of a step to plain Adam's one pass. The floor is the forward and backward pass.

Processes: the same batch on one process of one thread and shared by two under torchrun (gloo), relative to
plain Adam on one process; a sampler has a chain in every process, so its time is per chain.

    python benchmarks/growth.py [--seconds 2] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from steps import (
    BARE,
    CHAIN,
    baseline,
    cycle,
    make_method,
    posterior_of,
    prediction_jobs,
    problem,
    read,
    step_of,
    write,
)
from timing import budgeted, progress, ratios
from torch import Tensor, nn

from torchbayes.core import distributed
from torchbayes.train.registry import METHODS

FLOOR = BARE[0]
SHOWN = ("bbb", "vogn", "ivon", "sgld", "atmc", "hypernet")
DRAWING = ("bbb", "vogn", "ivon", "noisy-kfac")  # those with several draws per step
CHAINS = {name for name in SHOWN if METHODS[name].family == CHAIN}  # one in every process
SETTINGS = {
    "batch": (16, 64, 256, 1024),
    "width": (150, 300, 600, 1200),
    "draws": (1, 2, 4, 8),
    "predicting": (1, 4, 16, 32),
}
PROCESSES = (1, 2)
ROUNDS = {"least": 8, "most": 30}


def pair(name: str, to: str, seconds: float, **setting: int) -> dict[str, float]:
    """Measure a variant relative to a plain optimiser."""
    plain = {key: value for key, value in setting.items() if key != "draws"}
    jobs = {to: step_of("mlp", to, **plain), name: step_of("mlp", name, **setting)}
    every = 1 if name in BARE else cycle(name)
    return ratios(budgeted(jobs, seconds, **ROUNDS, cycle=every), to, mean=every > 1)[name]


def growth(along: str, seconds: float) -> dict[str, Any]:
    """Measure every method at every setting along one axis, on the MLP."""
    rows: dict[str, Any] = {}
    names = DRAWING if along == "draws" else SHOWN
    for value in SETTINGS[along]:
        for to in sorted({baseline(name) for name in names}):
            setting = {} if along == "draws" else {along: value}
            floor = rows.setdefault(f"{FLOOR}, to {to}", {"to": to, "points": {}})
            floor["points"][str(value)] = pair(FLOOR, to, seconds, **setting)
        for name in names:
            row = rows.setdefault(name, {"to": baseline(name), "points": {}})
            row["points"][str(value)] = pair(name, baseline(name), seconds, **{along: value})
        progress(f"{along} {value}")
    return rows


def predicting(seconds: float) -> dict[str, Any]:
    """Measure predictions of 1,000 inputs with k draws, relative to k plain forward passes."""
    rows: dict[str, Any] = {}
    model, _, _ = problem("mlp")
    inputs = torch.randn(1000, 784)
    for draws in SETTINGS["predicting"]:
        for kind in ("Gaussian", "Samples"):
            posterior = posterior_of(kind, model, draws, (784,))
            jobs = prediction_jobs(model, posterior, inputs, draws)
            found = ratios(budgeted(jobs, seconds, least=3, most=20), "plain")
            row = rows.setdefault(kind, {"to": "plain forward passes", "points": {}})
            row["points"][str(draws)] = found["ours"]
        progress(f"predicting {draws}")
    return rows


def shared_step(name: str, net: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """Make a step of this process's part of a batch, as `fit` takes it under torchrun."""
    world = distributed.world_size()
    if name in (FLOOR, "Adam"):
        optimizer = torch.optim.Adam(net.parameters())

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            if name == "Adam":
                distributed.average_gradients(list(net.parameters()), 1 / world)
                optimizer.step()

        return step
    made = make_method(name, net)
    parameters = [p for group in made.optimizer.param_groups for p in group["params"]]

    def closure() -> Tensor:
        made.optimizer.zero_grad()
        loss = made.loss(inputs, targets)
        loss.backward()
        if made.reduces_gradients and not made.one_per_rank:
            distributed.average_gradients(parameters, 1 / world)
        return loss

    return lambda: made.step(closure)  # type: ignore[return-value]


def worker(seconds: float) -> None:
    """Measure in every process under torchrun; the first one prints."""
    torch.set_num_threads(1)
    with distributed.process_group():
        first, world = distributed.rank() == 0, distributed.world_size()
        found: dict[str, Any] = {}
        for network in ("mlp", "lenet5"):
            alone = step_of(network, "Adam")  # the whole batch, on the first process only
            for name in (FLOOR, "Adam", *SHOWN):
                net, inputs, targets = problem(network)
                chains = world if name in CHAINS else 1
                share = len(targets) * chains // world
                mine = slice(distributed.rank() * share % len(targets), None)
                step = shared_step(name, net, inputs[mine][:share], targets[mine][:share])

                def plain(alone: Callable[[], None] = alone) -> None:
                    if first:
                        alone()
                    distributed.barrier()

                def together(step: Callable[[], None] = step) -> None:
                    step()
                    distributed.barrier()

                # The same number of rounds everywhere, or they would wait for each other for ever.
                jobs = {"plain": plain, name: together}
                times = budgeted(jobs, seconds, least=12, most=12)
                row = ratios(times, "plain")[name]
                found.setdefault(network, {})[name] = {
                    key: round(value / chains, 3) for key, value in row.items()
                }
        if first:
            print(json.dumps(found), flush=True)


def processes(seconds: float) -> dict[str, Any]:
    """Measure a step on one and on two processes, relative to plain Adam on one."""
    rows: dict[str, Any] = {}
    for count in PROCESSES:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(count), __file__, "--worker", "--seconds", str(seconds)),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        for network, found in json.loads(done.stdout.splitlines()[-1]).items():
            for name, point in found.items():
                row = rows.setdefault(network, {}).setdefault(name, {"to": "Adam", "points": {}})
                row["points"][str(count)] = point
        progress(f"processes {count}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--along", choices=(*SETTINGS, "processes"), action="append")
    parser.add_argument("--seconds", type=float, default=1.5, help="for a pair, as rounds allow")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.seconds)
    torch.set_num_threads(arguments.threads)
    stored = read(arguments.json, {})
    for along in arguments.along or (*SETTINGS, "processes"):
        if along == "processes":
            stored[along] = processes(arguments.seconds)
        elif along == "predicting":
            stored[along] = predicting(arguments.seconds)
        else:
            stored[along] = growth(along, arguments.seconds)
        write(arguments.json, stored, arguments.threads)


if __name__ == "__main__":
    main()
