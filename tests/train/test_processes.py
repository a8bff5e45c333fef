"""Several processes: one that fails, and a run that goes on with another number of them."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.core import distributed, reduction
from torchbayes.posterior import Samples

from ..conformance.problems import blobs, small_net
from ..processes import Ended, processes
from ..stopping import StopAfter, Stopped

LIMIT = 4.0


def train(folder: Path, method: str, stop: int, options: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    progress = StopAfter(stop + 3 * rank) if stop else False
    try:
        tb.fit(
            small_net, blobs(), method, epochs=2, batch_size=60, folder=folder / "run", resume=True,
            checkpoint_seconds=0, progress=progress, **options,
        )  # fmt: skip
    except (Stopped, distributed.LostProcessError):
        assert stop


def draws(folder: Path) -> Samples:
    posterior = tb.load(folder / "run" / "posterior.safetensors", small_net())
    assert isinstance(posterior, Samples)
    return posterior


@pytest.mark.parametrize(
    ("method", "options", "begun", "goes_on"),
    [
        ("ensemble", {"members": 4}, 2, 1),
        ("ensemble", {"members": 4}, 1, 2),
        ("sghmc", {"samples": 2, "chains": 2}, 3, 2),
        ("sgld", {"samples": 2, "sample_folder": "bank"}, 2, 1),
    ],
)
def test_another_number_of_processes_ends_with_the_same_draws(
    method: str, options: dict[str, Any], begun: int, goes_on: int, tmp_path: Path
) -> None:
    def go(count: int, name: str, stop: int) -> None:
        here = tmp_path / name
        own = dict(options)
        if "sample_folder" in own:
            own["sample_folder"] = str(here / "bank")
        done = processes(count, train, here, method, stop, own)
        assert done.returncode == 0, done.stderr

    go(begun, "whole", 0)
    go(begun, "part", 6)
    go(goes_on, "part", 0)
    whole, part = draws(tmp_path / "whole"), draws(tmp_path / "part")
    assert len(part) == len(whole) == (4 if method == "ensemble" else len(whole))
    assert part.chains == whole.chains
    for one, other in zip(whole, part, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def fail(folder: Path, method: str, how: str, seconds: float) -> None:
    os.environ["TORCHBAYES_PROCESS_TIMEOUT"] = str(LIMIT)
    if int(os.environ["RANK"]) == 1:

        class Failing(StopAfter):
            def advance(self, loss: float) -> None:
                try:
                    super().advance(loss)
                except Stopped:
                    _fail(how, seconds)

        progress: Any = Failing(4)
    else:
        progress = False
        if how == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    started = time.monotonic()
    try:
        tb.fit(
            small_net, blobs(), method, epochs=4, batch_size=24, folder=folder / "run", resume=True,
            checkpoint_seconds=0, progress=progress,
        )  # fmt: skip
    except Exception as error:
        print(
            f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}", flush=True
        )
        raise SystemExit(3) from None
    print("finished", flush=True)


def _fail(how: str, seconds: float) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ArithmeticError("the second process has had enough")
    if how == "stop":
        _wake(seconds)
        os.kill(os.getpid(), signal.SIGSTOP)


def _wake(seconds: float) -> None:
    """Let another process continue this one, if it is to be."""
    if seconds and os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)


def faulty(how: str, folder: Path, method: str = "vogn", seconds: float = 0) -> Ended:
    return processes(2, fail, folder, method, how, seconds, timeout=60, grace=20)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("kill", "has lost contact .*process 1 has died"),
        ("raise", "has lost contact .*process 1 has ended: the second process has had enough"),
        ("stop", f"has lost contact .*no answer for {LIMIT:g} s"),
    ],
)
def test_a_failed_process_ends_the_others_in_time_with_one_sentence(
    how: str, sentence: str, tmp_path: Path
) -> None:
    started = time.monotonic()
    done = faulty(how, tmp_path)
    assert time.monotonic() - started < 40
    lines = [line for line in done.stdout.splitlines() if line.startswith("LostProcess")]
    assert len(lines) == 1, (done.stdout, done.stderr)
    assert re.search(sentence, lines[0])
    assert "start again with --resume" in lines[0]


class Fragile(nn.Module):
    """A network whose backward pass ends its process, if it is the second one, after some updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.left = nn.Linear(4, 16), nn.Linear(16, 3), 5

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if hidden.requires_grad and os.environ["RANK"] == "1":
            hidden.register_hook(self._fail)
        return self.last(hidden)  # type: ignore[no-any-return]

    def _fail(self, _: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def fail_between_messages(method: str) -> None:
    """Messages leave during the backward pass, that of the last layer before the process ends."""
    os.environ["TORCHBAYES_PROCESS_TIMEOUT"] = str(LIMIT)
    reduction.shared_bytes = lambda _: None  # type: ignore[attr-defined]
    reduction.BUCKET = 100  # type: ignore[misc]
    try:
        tb.fit(Fragile(), blobs(), method, epochs=4, batch_size=24, progress=False)
    except distributed.LostProcessError as error:
        print(f"LostProcess: {error}", flush=True)
        raise SystemExit(3) from None


@pytest.mark.parametrize("method", ["ivon", "map"])
def test_a_process_that_is_killed_in_its_backward_pass_ends_the_others(method: str) -> None:
    done = processes(2, fail_between_messages, method, timeout=60, grace=20)
    assert done.returncode == 3, (done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, (done.stdout, done.stderr)
    assert re.search("has lost contact .*process 1 has died.*start again with --resume", lines[0])


def test_a_full_disk_ends_all(tmp_path: Path) -> None:
    done = faulty("disk", tmp_path)
    assert done.returncode == 3
    assert "WriteError" in done.stdout
    assert "could not be written" in done.stdout


def test_a_process_that_rests_for_a_while_is_waited_for(tmp_path: Path) -> None:
    done = faulty("stop", tmp_path, seconds=2.0)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.count("finished") == 2


def wait_long() -> None:
    """One process needs longer than the limit, but lives."""
    os.environ["TORCHBAYES_PROCESS_TIMEOUT"] = "1"
    with distributed.process_group():
        if distributed.rank() == 0:
            time.sleep(3)
        distributed.barrier()
        print(threading.active_count() > 1)


def test_waiting_is_not_bounded_as_long_as_the_others_live() -> None:
    done = processes(2, wait_long)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_the_limit_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHBAYES_PROCESS_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="TORCHBAYES_PROCESS_TIMEOUT is 'soon': expected a number"):
        distributed._limit()
