"""Two processes under torchrun (gloo) against one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchbayes as tb
from torchbayes.experiment import TrainedRun

SMALL = ["--data", "digits", "--model", "mlp", "--model-set", "hidden=[16]", "--batch-size", "64"]


def torchrun(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
        "--master-addr", "127.0.0.1", "--master-port", str(port),
        "-m", "torchbayes", "train", *SMALL, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def alone(*arguments: str) -> None:
    command = [sys.executable, "-m", "torchbayes", "train", *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["map"])
def test_two_processes_equal_one(method: str, tmp_path: Path) -> None:
    """The same global batches, shared: the averaged gradient is the whole batch's."""
    settings = ["--method", method, "--epochs", "2"]
    done = torchrun(*settings, "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    alone(*settings, "--out", str(tmp_path / "one"))
    one = TrainedRun(tmp_path / "one").posterior().mean()
    two = TrainedRun(tmp_path / "two").posterior().mean()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-3, atol=1e-5)


def test_ensemble_members_are_spread_over_processes(tmp_path: Path) -> None:
    settings = ["--method", "ensemble", "--epochs", "1", "--set", "members=3"]
    done = torchrun(*settings, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    posterior = TrainedRun(tmp_path / "run").posterior()
    assert isinstance(posterior, tb.Samples)
    assert len(posterior) == 3
    first = [weights["layers.0.weight"] for weights in posterior]
    for i in range(3):
        for j in range(i):
            assert not torch.equal(first[i], first[j])
    # Rank 0 trained members 0 and 2, rank 1 member 1: one epoch each.
    rows = [
        len((tmp_path / "run" / f"metrics{r}.jsonl").read_text().splitlines())
        for r in ("", "-rank1")
    ]
    assert rows == [2, 1]


def test_one_process_resumes_what_two_began(tmp_path: Path) -> None:
    settings = ["--method", "map", "--epochs", "3", "--checkpoint-seconds", "0"]
    done = torchrun(*settings, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "run" / "posterior.safetensors").unlink()
    alone(*settings, "--out", str(tmp_path / "run"), "--resume")
    assert (tmp_path / "run" / "posterior.safetensors").exists()
