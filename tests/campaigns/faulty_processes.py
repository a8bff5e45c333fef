"""One of two processes is killed, stopped, out of disk or fails: the other ends in time, in one sentence."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..train.test_processes import LIMIT, faulty

__all__ = ["rounds"]

_EXPECTED = {
    "kill": "LostProcessError after ([0-9.]+) s",
    "raise": "LostProcessError after ([0-9.]+) s.*has ended: the second process",
    "stop": "LostProcessError after ([0-9.]+) s.*no answer for",
    "disk": "WriteError after ([0-9.]+) s",
    "rest": "finished",
}
_ALLOWED = {"kill": 30.0, "raise": 30.0, "stop": LIMIT + 30.0, "disk": 30.0, "rest": 90.0}


def rounds(folder: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Let processes fail in turns, for ever; yield fault and verdict."""
    draw = random.Random(f"processes {seed}")
    names = {"kill": "killed", "raise": "exception", "stop": "stopped for ever", "disk": "out of disk",
             "rest": "stopped for a while"}  # fmt: skip
    number = 0
    while True:
        for how in draw.sample(list(_EXPECTED), len(_EXPECTED)):
            number += 1
            method = draw.choice(["vogn", "map", "bbb"])
            place = folder / str(number)
            place.mkdir(parents=True)
            started = time.monotonic()
            try:
                done = faulty(
                    "stop" if how == "rest" else how, place, method, 2.0 if how == "rest" else 0
                )
                found = re.search(_EXPECTED[how], done.stdout)
                took = time.monotonic() - started
                if found is None:
                    yield names[how], f"{method}: {done.stdout[-200:]} {done.stderr[-200:]}"
                elif took > _ALLOWED[how]:
                    yield names[how], f"{method}: took {took:.0f} s"
                else:
                    yield names[how], "as it should"
            except AssertionError as error:
                yield names[how], f"{method}: {error}"
            shutil.rmtree(place, ignore_errors=True)
