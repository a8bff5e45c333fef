"""Two processes (gloo) against one; what becomes of a run whose process ends is torchrun's own doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchbayes as tb
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.train.interrupt import StopRequest
from torchbayes.train.loop import Training
from torchbayes.train.run_folder import RunFolder

from ..processes import Ended, processes, torchbayes

SMALL = ["--data", "digits", "--model", "mlp", "--model-set", "hidden=[16]", "--batch-size", "64"]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def pair(*arguments: str) -> Ended:
    return torchbayes("train", *SMALL, *arguments, count=2)


def saved(run: Path) -> dict[str, Any]:
    state = RunFolder(run).checkpoint.read()
    assert state is not None
    return state


def start(*arguments: str) -> subprocess.Popen[str]:
    """Two processes under torchrun itself, in the background, in a process group of their own."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", "2",
        "-m", "torchbayes", "train", *SMALL, *arguments,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip


def workers(agent: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun has started, by rank."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int(folder.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            variables = folder.joinpath("environ").read_bytes() if parent == agent.pid else b""
        except OSError:
            continue  # it has ended meanwhile
        ranks = [v[5:] for v in variables.split(b"\0") if v.startswith(b"RANK=")]
        if ranks:
            found[int(ranks[0])] = int(folder.name)
    return [found[r] for r in sorted(found)]


def alone(*arguments: str) -> None:
    done = torchbayes("train", *SMALL, *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["map"])
def test_two_processes_equal_one(method: str, tmp_path: Path) -> None:
    """The same global batches, shared: the averaged gradient is the whole batch's."""
    settings = ["--method", method, "--epochs", "2"]
    done = pair(*settings, "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    alone(*settings, "--out", str(tmp_path / "one"))
    one = TrainedRun(tmp_path / "one").posterior().mean()
    two = TrainedRun(tmp_path / "two").posterior().mean()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-3, atol=1e-5)


def test_ensemble_members_are_spread_over_processes(tmp_path: Path) -> None:
    settings = ["--method", "ensemble", "--epochs", "1", "--set", "members=3"]
    done = pair(*settings, "--out", str(tmp_path / "run"))
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
    done = pair(*settings, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "run" / "posterior.safetensors").unlink()
    alone(*settings, "--out", str(tmp_path / "run"), "--resume")
    assert (tmp_path / "run" / "posterior.safetensors").exists()


@pytest.mark.parametrize("method", ["vogn", "ivon"])
def test_natural_gradients_in_two_processes_and_another_world_size(
    method: str, tmp_path: Path
) -> None:
    """Two processes begin, one goes on, two go on again; every rank's draws are its own."""
    run, settings = tmp_path / "run", ["--method", method, "--checkpoint-seconds", "0"]
    done = pair(*settings, "--epochs", "3", "--json", "--out", str(run))
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout)
    assert whole["accuracy"] > 0.7  # it has learned: 10 classes, 66 updates
    # The checkpoint of an earlier epoch, as if both had been killed there.
    state = saved(run)
    assert len(state["random"]) == 2
    assert not torch.equal(state["random"][0]["method"], state["random"][1]["method"])
    state["epoch"], state["batch"], state["history"] = 1, 0, state["history"][:1]
    RunFolder(run).checkpoint.write(state)
    alone(*settings, "--epochs", "3", "--out", str(run), "--resume")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert len(saved(run)["random"]) == 1
    state = saved(run)
    state["epoch"], state["batch"], state["history"] = 2, 0, state["history"][:2]
    RunFolder(run).checkpoint.write(state)
    done = pair(*settings, "--epochs", "3", "--json", "--out", str(run), "--resume")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"] > 0.7


def test_a_killed_process_ends_the_run_and_it_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["--method", "vogn", "--epochs", "400", "--checkpoint-seconds", "0.2"]
    agent = start(*settings, "--out", str(run))
    try:
        deadline = time.monotonic() + 120
        while not (run / "checkpoint-previous.safetensors").exists():
            assert time.monotonic() < deadline, "no checkpoint in time"
            assert agent.poll() is None, agent.communicate()[1]
            time.sleep(0.1)
        _, second = workers(agent)
        os.kill(second, signal.SIGKILL)
        killed = time.monotonic()
        _, errors = agent.communicate(timeout=60)
        assert time.monotonic() - killed < 45
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.communicate()
    assert agent.returncode != 0
    # One sentence of rank 0, and none of its own tracebacks.
    assert "has lost contact with another one" in errors
    assert "start again with --resume" in errors
    assert "torchbayes/train.py" not in errors
    reached = saved(run)["epoch"]
    assert not (run / "posterior.safetensors").exists()
    files = RunFolder(run)
    files.write_config({**files.read_config(), "epochs": reached + 1})
    settings[3] = str(reached + 1)
    done = pair(*settings, "--out", str(run), "--resume")
    assert done.returncode == 0, done.stderr
    assert (run / "posterior.safetensors").exists()


def test_ctrl_c_on_one_process_stops_both_at_the_same_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    agent = start(
        "--method", "ivon", "--epochs", "400", "--checkpoint-seconds", "3600", "--out", str(run)
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline, "no epoch in time"
            assert agent.poll() is None, agent.communicate()[1]
            time.sleep(0.1)
        os.kill(workers(agent)[1], signal.SIGINT)
        _, errors = agent.communicate(timeout=60)
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.communicate()
    assert "saved in" in errors
    assert "torchbayes/train.py" not in errors  # torchrun's own traceback, not ours
    assert saved(run)["epoch"] >= 1


def test_a_signal_during_the_exchange_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    training = SimpleNamespace(folder=None, shared=True)

    def exchange(flags: list[bool]) -> list[bool]:
        sent = list(flags)
        stop.requested = True  # as the handler does, while the processes talk
        return sent

    monkeypatch.setattr("torchbayes.core.distributed.any_of", exchange)
    assert Training._pause(training, stop) == (False, False)  # the others know nothing of it yet
    assert Training._pause(training, stop) == (True, True)


def learn_noise(folder: Path) -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    noise = torch.linspace(0, 1, 64).unsqueeze(1) * torch.randn(64, 1)  # the halves differ in it
    run = tb.fit(
        torch.nn.Linear(1, 1), (x, x + 0.3 * noise), "vogn", epochs=5, batch_size=16, progress=False
    )  # fmt: skip
    state = run.likelihood.state_dict() | run.model.state_dict()
    torch.save(state, folder / f"{os.environ['RANK']}.pt")


def test_a_learned_noise_stays_the_same_on_all_processes(tmp_path: Path) -> None:
    """VOGN reduces its own statistics; the noise's gradient is averaged all the same."""
    done = processes(2, learn_noise, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert len(first) > 2  # the noise is among them
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
