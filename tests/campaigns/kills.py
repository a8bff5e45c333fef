"""Kill a run before one of its operations on files, resume it, and compare with one that was never stopped.

A child process counts, by an audit hook, what it does to files in its folder (creating, renaming and
removing them) and kills itself before the operation of a given number. A kill after an operation is one
before the next. What is not seen by audit hooks is killed at random moments, too.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..processes import forkserver, processes
from .cases import Case

__all__ = ["Killer", "rounds", "watched"]

_EVENTS = {"open": 0, "os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.truncate": 0}
_PATIENCE = 600.0


def watched(folder: str, meet: Callable[[int], None]) -> Callable[[], int]:
    """Call `meet` with the number of every operation on files below a folder; return how to count them."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        place = _EVENTS.get(event)
        if place is None:
            return
        path = arguments[place]
        if isinstance(path, int) or not os.path.abspath(os.fsdecode(path)).startswith(folder):
            return
        # Reading changes nothing.
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        count += 1
        meet(count)

    sys.addaudithook(watch)
    return lambda: count


def _child(case: Case, folder: str, at: int, victim: int) -> None:
    def meet(number: int) -> None:
        if number == at and int(os.environ.get("RANK", "0")) == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    if "RANK" not in os.environ:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    count = watched(folder, meet)
    began = time.monotonic()
    if at < 0:  # a time in milliseconds
        timer = threading.Timer(-at / 1000, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    try:
        case.go(Path(folder))
    except SystemExit as end:
        if end.code:
            raise
    if not at:
        took = round(1000 * (time.monotonic() - began))
        Path(f"{folder}.operations{os.environ.get('RANK', '0')}").write_text(f"{count()} {took}")


def _run(case: Case, folder: Path, count: int, at: int = 0, victim: int = 0) -> str:
    """Run a case; return "" or what was wrong."""
    if count > 1:
        ended = processes(count, _child, case, str(folder), at, victim, timeout=_PATIENCE)
        return "" if ended.returncode == 0 else f"code {ended.returncode}: {ended.stderr[-300:]}"
    child = forkserver().Process(target=_child, args=(case, str(folder), at, victim))
    child.start()
    child.join(_PATIENCE)
    if child.is_alive():
        child.kill()
        return f"not done in {_PATIENCE:.0f} s"
    return "" if child.exitcode == 0 else f"code {child.exitcode}"


class Killer:
    """Kills one case as often as it is asked to.

    Args:
        case: What to kill.
        folder: An empty folder to work in.
        seed: Decides where.
    """

    def __init__(self, case: Case, folder: Path, seed: int) -> None:
        self.case, self.folder = case, folder
        self.draw = random.Random(f"{seed} {case.name}")
        self.number = 0
        folder.mkdir(parents=True)
        self._begin(folder / "whole")
        wrong = _run(case, folder / "whole", case.processes)
        assert not wrong, f"{case.name} does not run at all: {wrong}"
        self.whole = case.look(folder / "whole")
        counts = [
            Path(f"{folder / 'whole'}.operations{rank}").read_text().split()
            for rank in range(case.processes)
        ]
        self.operations = [int(count) for count, _ in counts]
        self.milliseconds = int(counts[0][1])

    def _begin(self, place: Path) -> None:
        if self.case.begin is not None:
            self.case.begin(place)

    def kill(self, at: int | None = None) -> str | None:
        """Kill, resume, compare: return "equal", what was wrong, or None if it ended before the kill."""
        self.number += 1
        place = self.folder / str(self.number)
        victim = self.draw.choice([r for r, count in enumerate(self.operations) if count])
        if at is None and self.case.timed and self.draw.random() < 0.5:
            at = -self.draw.randint(1, self.milliseconds)
        at = self.draw.randint(1, self.operations[victim]) if at is None else at
        count = self.draw.choice(self.case.others)
        try:
            self._begin(place)
            if not _run(self.case, place, self.case.processes, at, victim):
                return None
            if not any(place.rglob("config.toml")):  # not begun: it is the next start that decides
                count = self.case.processes
            wrong = _run(self.case, place, count)
            moment = f"before operation {at}" if at > 0 else f"after {-at} ms"
            what = f"killed {moment} of process {victim}, resumed with {count}"
            if wrong:
                return f"{what}: {wrong}"
            left = [file.name for file in place.rglob(".*.part")]
            if left:
                return f"{what}: left {left}"
            return "equal" if self.case.look(place) == self.whole else f"{what}: other results"
        except Exception as error:
            return f"operation {at}: {type(error).__name__}: {str(error)[:200]}"
        finally:
            shutil.rmtree(place, ignore_errors=True)


def rounds(cases: list[Case], folder: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Kill the cases in turns, for ever; yield case and verdict."""
    order = list(cases)
    random.Random(seed).shuffle(order)
    killers: dict[str, Killer] = {}
    while True:
        for number, case in enumerate(order):
            if case.name not in killers:
                killers[case.name] = Killer(case, folder / f"{number}", seed)
            # A command takes as long as dozens of small runs: it is killed once where they are four times.
            often = 1 if case.processes > 1 or case.name.startswith("torchbayes") else 4
            for _ in range(often):
                verdict = killers[case.name].kill()
                if verdict is not None:
                    yield case.name, verdict
