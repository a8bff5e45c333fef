"""A folder has one user at a time, and a lock ends with its process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import pytest

from torchbayes.core.errors import RunError
from torchbayes.core.locks import folder_lock


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads, which the child has no use for
        return os.fork()


def taken(folder: Path) -> bool:
    try:
        with folder_lock(folder):
            return False
    except RunError:
        return True


def test_the_second_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with folder_lock(tmp_path):
        second = folder_lock(tmp_path)
        with pytest.raises(RunError, match=f"in use by process {os.getpid()}: wait"):
            second.__enter__()
    assert not taken(tmp_path)


def test_a_killed_process_frees_the_folder_though_its_worker_lives_on(tmp_path: Path) -> None:
    child = fork()
    if child == 0:
        with folder_lock(tmp_path):
            worker = os.fork()  # as a data loader does
            if worker:
                (tmp_path / "worker").write_text(str(worker))
            time.sleep(60)
            os._exit(0)
    while not (tmp_path / "worker").exists() or not (tmp_path / "worker").read_text():
        time.sleep(0.01)
    assert taken(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    worker = int((tmp_path / "worker").read_text())
    try:
        os.kill(worker, 0)  # it is still there
        assert not taken(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    lock = folder_lock(tmp_path / "missing")
    with pytest.raises(RunError, match=r"cannot write to .*choose another"):
        lock.__enter__()
