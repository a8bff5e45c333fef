"""Let a write fail: whatever the system says, the answer is one sentence, and what was there before resumes.

The errors come from an audit hook, before a file is opened for writing, renamed, removed or a folder is made,
from `os.fsync`, and from a limit on the size of files.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchbayes.core.errors import FileError, WriteError

from ..processes import forkserver
from .cases import Case
from .kills import watched

__all__ = ["ERRORS", "rounds"]

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENOENT)


def _child(case: Case, folder: str, code: int, at: int, size: int) -> None:
    """Run a case with a fault; the exit code is 0, 2 for one sentence, or 7 for anything else."""
    report = Path(f"{folder}.said")
    Path(folder).mkdir(parents=True, exist_ok=True)  # the campaign's own, which must not fail

    over = False

    def meet(number: int) -> None:
        if number == at and not over:
            raise OSError(code, os.strerror(code))

    def say(text: str) -> None:
        nonlocal over
        over = True  # what the campaign itself writes must not fail
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        report.write_text(text)

    if at > 0:
        watched(folder, meet)
    if at < 0:
        left, sync = [-at], os.fsync

        def failing(handle: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(code, os.strerror(code))
            sync(handle)

        os.fsync = failing
    if size:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        case.go(Path(folder))
    except (WriteError, FileError) as error:
        say(str(error))
        os._exit(2 if "\n" not in str(error) else 7)
    except SystemExit as end:
        say(f"exit code {end.code}")
        os._exit(2 if end.code == 2 else 7 if end.code else 0)
    except BaseException as error:
        say(f"{type(error).__name__}: {error}")
        os._exit(7)
    os._exit(0)


def _run(case: Case, folder: Path, code: int = 0, at: int = 0, size: int = 0) -> int | None:
    child = forkserver().Process(target=_child, args=(case, str(folder), code, at, size))
    child.start()
    child.join(600)
    if child.is_alive():
        child.kill()
    return child.exitcode


def _begin(case: Case, folder: Path) -> None:
    if case.begin is not None:
        case.begin(folder)


def rounds(cases: list[Case], folder: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Let writes of the cases fail in turns, for ever; yield error and verdict."""
    draw = random.Random(f"writes {seed}")
    sound: dict[str, Any] = {}
    number = 0
    while True:
        for case in draw.sample(cases, len(cases)):
            if case.name not in sound:
                _begin(case, folder / f"whole{len(sound)}")
                assert _run(case, folder / f"whole{len(sound)}") == 0
                sound[case.name] = case.look(folder / f"whole{len(sound)}")
            number += 1
            place, code = folder / str(number), draw.choice(ERRORS)
            how = draw.choice(["operation", "operation", "flush", "size"])
            at = {"operation": draw.randint(1, 60), "flush": -draw.randint(1, 20)}.get(how, 0)
            size = draw.randint(200, 8000) if how == "size" else 0
            name = "EFBIG" if how == "size" else errno.errorcode[code]
            yield name, _verdict(case, sound[case.name], place, code, at, size)
            shutil.rmtree(place, ignore_errors=True)
            Path(f"{place}.said").unlink(missing_ok=True)


def _verdict(case: Case, sound: Any, place: Path, code: int, at: int, size: int) -> str:
    what = f"{case.name}, {errno.errorcode[code]} at {at}, size {size}"
    _begin(case, place)
    ended = _run(case, place, code, at, size)
    if ended not in (0, 2):
        said = Path(f"{place}.said")
        return f"{what}: code {ended}: {said.read_text()[:200] if said.exists() else ''}"
    if ended == 0:  # the fault came too late, or what failed was not needed
        return (
            "not needed" if case.look(place) == sound else f"{what}: exit 0, but not all is there"
        )
    if _run(case, place) != 0:
        said = Path(f"{place}.said")
        return f"{what}: cannot be resumed: {said.read_text()[:200] if said.exists() else ''}"
    return "one sentence" if case.look(place) == sound else f"{what}: other results"
