"""Kill a run before each of its operations on files, resume it, and compare with one that was never stopped.

A child process counts, by an audit hook, what it does to files in its folders (creating, renaming and
removing them) and kills itself before the operation of a given number. A kill after an operation is one
before the next.

`python -m tests.campaigns.kills --minutes 10` goes through all methods; the tests run a small part.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import torchbayes as tb

from ..conformance.problems import blobs, small_net
from ..processes import forkserver

_EVENTS = {"open": 0, "os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.truncate": 0}
_ON_DISK = ("sgld", "sghmc")


@dataclass(frozen=True)
class Case:
    """A run to be killed.

    Attributes:
        method: Name of the method.
        on_disk: Whether its samples are kept as files.
    """

    method: str
    on_disk: bool = False

    def train(self, folder: Path) -> None:
        """Train in `folder`, with a checkpoint after every update, or continue."""
        torch.set_num_threads(1)
        options: dict[str, Any] = {"sample_folder": str(folder / "bank")} if self.on_disk else {}
        tb.fit(
            small_net, blobs(), self.method, epochs=2, batch_size=120, folder=folder / "run",
            resume=True, checkpoint_seconds=0.0, progress=False, **options,
        )  # fmt: skip


@dataclass
class Outcome:
    """What a campaign has found.

    Attributes:
        kills: Number of kills.
        equal: Runs that ended bit-equal after a kill.
        bad: Those that did not, each with its case, the operation and what was wrong.
    """

    kills: int = 0
    equal: int = 0
    bad: list[str] = field(default_factory=list)


def _child(case: Case, folder: str, at: int) -> None:
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        place = _EVENTS.get(event)
        if place is None:
            return
        path = arguments[place]
        if isinstance(path, int) or not os.fsdecode(path).startswith(folder):
            return
        # Reading changes nothing.
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    if at:
        sys.addaudithook(watch)
    case.train(Path(folder))


def _run(case: Case, folder: Path, at: int = 0) -> int | None:
    child = forkserver().Process(target=_child, args=(case, str(folder), at))
    child.start()
    child.join()
    return child.exitcode


def _draws(folder: Path) -> Iterator[torch.Tensor]:
    posterior = tb.load(folder / "run" / "posterior.safetensors", small_net())
    generator = torch.Generator().manual_seed(0)
    for weights in posterior.draws(8, generator):
        yield torch.cat([tensor.flatten().double() for tensor in weights.values()])


def kill_and_resume(case: Case, whole: Path, place: Path, at: int, outcome: Outcome) -> bool:
    """Kill a run before operation `at` and resume it; return False if it has fewer operations."""
    if _run(case, place, at) == 0:
        return False
    outcome.kills += 1
    what = f"{case}, operation {at}"
    if _run(case, place) != 0:
        outcome.bad.append(f"{what}: cannot be resumed")
        return True
    left = [file.name for file in place.rglob(".*.part")]
    same = all(map(torch.equal, _draws(whole), _draws(place)))
    if left or not same:
        outcome.bad.append(f"{what}: {f'left {left}' if left else 'other weights'}")
    else:
        outcome.equal += 1
    return True


def campaign(cases: list[Case], seconds: float, points: list[int] | None = None) -> Outcome:
    """Kill every case before each of its operations, or the given ones, as long as there is time."""
    outcome, end = Outcome(), time.monotonic() + seconds
    for case in cases:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            assert _run(case, folder / "whole") == 0, f"{case} does not run at all"
            for at in points if points is not None else range(1, 10_000):
                if time.monotonic() > end:
                    return outcome
                if not kill_and_resume(case, folder / "whole", folder / f"{at}", at, outcome):
                    break
    return outcome


def all_cases() -> list[Case]:
    """Every method, and samplers with their samples on disk."""
    return [*(Case(name) for name in tb.METHODS), *(Case(name, True) for name in _ON_DISK)]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="order of the methods")
    arguments = parser.parse_args()
    cases = all_cases()
    random.Random(arguments.seed).shuffle(cases)
    found = campaign(cases, 60 * arguments.minutes)
    print("| seed | kills | bit-equal | bad |\n| ---: | ---: | ---: | ---: |")
    print(f"| {arguments.seed} | {found.kills} | {found.equal} | {len(found.bad)} |")
    print(*found.bad, sep="\n")
    sys.exit(bool(found.bad))


if __name__ == "__main__":
    _main()
