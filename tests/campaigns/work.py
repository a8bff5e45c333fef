"""One of the campaign's two processes: goes on until the time is over and writes a line for every attempt."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from . import cases, damage, faulty_processes, hammer, kills, steady, writes

_SHARES = (
    ("damaged files", 40.0),
    ("failing writes", 25.0),
    ("failing processes", 35.0),
    ("threads", 5.0),
)
_TIMES = {"damaged files": 300}  # attempts at once


def _some(source: Iterator[tuple[str, str]], out: TextIO, part: str, end: float) -> bool:
    """Take attempts until the time; return whether there may be more."""
    while time.monotonic() < end:
        for _ in range(_TIMES.get(part, 1)):
            found = next(source, None)
            if found is None:
                return False
            out.write(json.dumps([part, *found]) + "\n")
        out.flush()
    return True


def _place() -> str | None:
    """Return a folder in memory, if there is room: every file is flushed, which a disk takes long for."""
    memory = Path("/dev/shm")
    room = memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30
    return str(memory) if room else None


def main(kind: str, file: str, seed: int, seconds: float) -> None:
    """Do a part of the campaign."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    end = time.monotonic() + seconds
    place = tempfile.TemporaryDirectory(prefix=f"campaign-{kind}-", dir=_place())
    with place as name, open(file, "a") as out:
        folder = Path(name).resolve()
        if kind == "kills":
            _some(kills.rounds(cases.all_cases(), folder, seed), out, "kills", end)
            return
        for part in ("damage", "writes", "steady"):
            (folder / part).mkdir()
        own = [cases.fit_case(m) for m in ("map", "vogn", "swag", "ensemble")]
        own += [cases.fit_case(m, on_disk=True) for m in ("sgld", "sghmc")]
        commands = {
            case.name: case for case in cases.all_cases() if case.name.startswith("torchbayes")
        }
        own += [commands.pop("torchbayes train"), *commands.values()]
        sources = {
            "damaged files": damage.rounds(folder / "damage", seed),
            "failing writes": writes.rounds(own, folder / "writes", seed),
            "failing processes": faulty_processes.rounds(folder / "processes", seed),
            "threads": hammer.rounds(),
        }
        # On a short run, fewer steps.
        watching: Iterator[tuple[str, str]] = steady.rounds(
            folder / "steady", min(1.0, seconds / 600)
        )
        scale = min(1.0, seconds / 600)
        for part, share in itertools.cycle(_SHARES):
            if time.monotonic() >= end:
                return
            _some(sources[part], out, part, min(end, time.monotonic() + scale * share))
            if part != "damaged files":
                _some(watching, out, "memory", min(end, time.monotonic() + scale * 10.0))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
