"""Two processes with half the batch each, relative to one process with all of it: the time of a step.

Run: python benchmarks/processes.py --json results/processes.json
Three processes stay for the whole measurement, each with one thread: one that is alone, and two that share
batches through gloo. They take turns, a few steps at a time. The time of a turn is that of the slower of the
two. Beside it stand the processor time of one of the two relative to the one that is alone, which says what
the work is when other programs keep the cores busy, and what a process sends in a step.

With `--roads` there are more pairs, whose sums go other ways: through shared memory, as usual on one machine;
as messages during the backward pass, as between machines; as messages after it; or in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from steps import make_method, method_step, problem, write
from timing import progress, ratios

from torchbayes.core import reduction

JOBS = (("mlp", "vogn"), ("mlp", "ivon"), ("resnet20", "vogn"), ("resnet20", "ivon"))
AT_MOST = {("mlp", "vogn"): 1.0, ("resnet20", "vogn"): 0.65, ("resnet20", "ivon"): 0.65}
BATCH = {"mlp": 128, "resnet20": 64}
ALONE = "one process"
ROADS = ("memory", "messages", "late", "bfloat16")


@contextmanager
def counting(sent: dict[str, int]) -> Iterator[None]:
    """Count the bytes and messages that go through `all_reduce`."""
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["bytes"] += tensor.numel() * tensor.itemsize
        sent["messages"] += 1
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield
    finally:
        dist.all_reduce = plain


def take(road: str) -> None:
    """Let sums over processes go this way."""
    if road not in (ALONE, "memory"):
        reduction.shared_bytes = lambda _: None
    if road == "late":
        reduction.Reduction.watches = property(lambda _: False)
    if road == "bfloat16":
        os.environ["TORCHBAYES_MESSAGES"] = "bfloat16"


def serve(pipe: Connection, rank: int, port: int, among: int, road: str) -> None:
    """Take the steps that are asked for, and say how long they took and what they sent."""
    torch.set_num_threads(1)
    take(road)
    if among > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=among
        )
    step: Callable[[], Any] | None = None
    sent = {"bytes": 0, "messages": 0}
    with counting(sent):
        while True:
            asked = pipe.recv()
            if asked is None:
                break
            if isinstance(asked, tuple):
                network, method = asked
                net, inputs, targets = problem(network, BATCH[network] // among)
                step = method_step(make_method(method, net), inputs, targets)
                pipe.send(None)
                continue
            assert step is not None
            sent.update(bytes=0, messages=0)
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(asked):
                step()
            pipe.send(
                (
                    (time.perf_counter() - wall) / asked,
                    (time.process_time() - processor) / asked,
                    sent["bytes"] // asked,
                    sent["messages"] // asked,
                )
            )
    if among > 1:
        dist.destroy_process_group()


def ask(pipes: list[Connection], what: Any) -> list[Any]:
    """Have all of some processes do the same at the same time."""
    for pipe in pipes:
        pipe.send(what)
    return [pipe.recv() for pipe in pipes]


def measured(
    sides: dict[str, list[Connection]], network: str, method: str, seconds: float
) -> dict[str, dict[str, Any]]:
    """The ratios of one method on one network, by road."""
    for pipes in sides.values():
        ask(pipes, (network, method))
    for pipes in sides.values():
        ask(pipes, 3)
    once = sum(max(row[0] for row in ask(pipes, 2)) for pipes in sides.values())
    steps = max(1, round(0.5 / once))
    rounds = min(60, max(8, int(seconds / (once * steps))))
    wall: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    sent: dict[str, dict[str, int]] = {}
    for _ in range(rounds):
        for side, pipes in sides.items():
            rows = ask(pipes, steps)
            wall[side].append(max(row[0] for row in rows))
            processor[side].append(statistics.mean(row[1] for row in rows))
            sent[side] = {"bytes": rows[0][2], "messages": rows[0][3]}
    times, processors = ratios(wall, ALONE), ratios(processor, ALONE)
    return {
        road: {
            "batch": BATCH[network],
            "rounds": rounds,
            "steps": steps,
            "time": times[road],
            "processor": processors[road],
            "sent": sent[road],
            "at_most": AT_MOST.get((network, method)),
        }
        for road in sides
        if road != ALONE
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each of the four pairs")
    parser.add_argument("--network")
    parser.add_argument("--method")
    parser.add_argument("--roads", nargs="+", choices=ROADS, default=["memory"])
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    started = []
    sides: dict[str, list[Connection]] = {}
    for side in (ALONE, *given.roads):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        among = 1 if side == ALONE else 2
        sides[side] = []
        for rank in range(among):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(there, rank, port, among, side), daemon=True
            )
            process.start()
            there.close()  # a process that dies then ends the measurement
            started.append(process)
            sides[side].append(here)
    table = {}
    print(
        "network  method road     time   quartiles         processor   MB sent  messages  at most"
    )
    for network, method in JOBS:
        if given.network not in (None, network) or given.method not in (None, method):
            continue
        for road, row in measured(sides, network, method, given.seconds).items():
            if road == given.roads[0]:
                table[f"{network} {method}"] = row
            time_, limit = row["time"], row["at_most"]
            print(
                f"{network:8s} {method:6s} {road:8s} {time_['ratio']:5.3f}  {time_['low']:.3f} to "
                f"{time_['high']:.3f}   {row['processor']['ratio']:9.3f} {row['sent']['bytes'] / 1e6:9.2f} "
                f"{row['sent']['messages']:9d}  {'' if limit is None else limit}",
                flush=True,
            )
    for pipe in (pipe for pipes in sides.values() for pipe in pipes):
        pipe.send(None)
    for process in started:
        process.join()
    progress("done")
    write(given.json, {"pairs": table}, 1)


if __name__ == "__main__":
    main()
