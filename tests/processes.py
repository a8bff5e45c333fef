"""Several processes as torchrun starts them, or a single fresh one, without the seconds of every import.

A process that imports torchbayes spends five seconds of a core on it, and torchrun starts three at a
time. Here one server imports it once, and every process is forked from that server: as fresh as a new
one, with the variables that torchrun sets. torchrun itself is for the tests of its own behaviour: what
it does with a process that dies, and what a user types.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

# All that a training run imports, the late imports of commands, torch's optimisers and scores included.
PRELOAD = [
    "torchbayes.cli",
    "torchbayes.experiments.compare",
    "torchbayes.plots.curve",
    "torchbayes.report",
    "torch._dynamo",
    "torchmetrics.functional.classification",
]


@dataclass(frozen=True)
class Ended:
    """The first exit code that is not 0, and what the processes have printed, in the order of ranks."""

    returncode: int
    stdout: str
    stderr: str


def forkserver() -> ForkServerContext:
    """The server's context; its children fork from it before it has any threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def processes(
    count: int,
    function: Callable[..., None],
    *arguments: Any,
    timeout: float = 240,
    grace: float = 0.0,
) -> Ended:
    """Call `function` in `count` processes of one group; like torchrun, end all when one has failed.

    Args:
        count: Number of processes.
        function: What each of them calls.
        *arguments: Its arguments.
        timeout: Seconds after which they have failed.
        grace: Seconds that the others have to end by themselves when one has failed.
    """
    # The processes meet at a store of this process, as at the one of torchrun's agent. A free port that the
    # first of them were to open later could be gone by then: other tests run at the same time.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printed = {s: [folder / f"{s}{rank}" for rank in range(count)] for s in ("out", "err")}
        for file in (*printed["out"], *printed["err"]):
            file.touch()  # a process may be ended before it gets there
        started = [
            forkserver().Process(target=_rank, args=(rank, group, folder, function, arguments))
            for rank in range(count)
        ]
        for process in started:
            process.start()
        latest = deadline = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in started):
                assert time.monotonic() < latest, f"not done in {timeout} s"
                if any(process.exitcode for process in started):
                    deadline = min(deadline, time.monotonic() + grace)
                    if time.monotonic() >= deadline:
                        break
                time.sleep(0.01)
        finally:
            for process in started:
                process.kill()
                process.join()
        codes = [process.exitcode or 0 for process in started]
        # A process that was killed here failed because of another one: its code comes last.
        codes.sort(key=lambda code: (code == 0, code < 0))
        out, err = ("".join(f.read_text() for f in files) for files in printed.values())
    return Ended(codes[0], out, err)


def torchbayes(*arguments: str, count: int = 1) -> Ended:
    """The command line in one process, or in several as under torchrun."""
    return processes(count, _command_line, *arguments)


def _rank(
    rank: int,
    group: dict[str, str],
    folder: Path,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    for stream, number in (("out", 1), ("err", 2)):
        file = os.open(folder / f"{stream}{rank}", os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(group | own)
    torch.set_num_threads(1)
    function(*arguments)


def _command_line(*arguments: str) -> None:
    from torchbayes.cli import main

    sys.argv = ["torchbayes", *arguments]
    main()
