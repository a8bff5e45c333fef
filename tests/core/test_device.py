"""Which device a process takes, with accelerators that are only claimed to be there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import torchbayes as tb
from torchbayes.cli import main
from torchbayes.core import device as device_module
from torchbayes.core import distributed
from torchbayes.core.device import process_device, take_device

from ..processes import processes


@contextmanager
def accelerators(count: int, current: int = 0) -> Iterator[list[int]]:
    """Let torch claim that there are `count` CUDA devices; yield the numbers that are made current."""
    chosen = [current]
    with (
        patch.object(torch.accelerator, "is_available", lambda: True),
        patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")),
        patch.object(torch.accelerator, "device_count", lambda: count),
        patch.object(torch.accelerator, "current_device_index", lambda: chosen[-1]),
        patch.object(torch.accelerator, "set_device_index", chosen.append),
        patch.object(device_module, "_try", lambda device: None),
    ):
        yield chosen


@pytest.fixture
def local_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("WORLD_SIZE", "4")
    return monkeypatch


def test_alone() -> None:
    """A single process computes where it is told to, where the network is, or on the accelerator."""
    assert process_device() == torch.device("cpu")
    with accelerators(4, current=2):
        assert process_device() == torch.device("cuda:2")
        assert process_device("cuda") == torch.device("cuda:2")
        assert process_device("cuda:1") == torch.device("cuda:1")
        assert process_device("cpu") == torch.device("cpu")
        assert process_device(own=torch.device("cpu")) == torch.device("cpu")
        assert process_device(own=torch.device("cuda:0")) == torch.device("cuda:0")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_every_process_has_its_own(rank: int, local_rank: pytest.MonkeyPatch) -> None:
    local_rank.setenv("LOCAL_RANK", str(rank))
    mine = torch.device("cuda", rank)
    with accelerators(4) as chosen:
        assert process_device() == process_device("cuda") == mine
        # torch puts all networks on the first device that a user moves to "cuda" …
        assert process_device(own=torch.device("cuda:0")) == mine
        # … but one that was put elsewhere was put there on purpose.
        assert process_device(own=torch.device("cuda:2")) == torch.device("cuda:2")
        assert process_device(own=torch.device("cpu")) == torch.device("cpu")
        assert take_device() == mine
        assert chosen[-1] == rank
        assert take_device("cpu") == torch.device("cpu")
        assert chosen == [0, rank]


def test_more_processes_than_devices(local_rank: pytest.MonkeyPatch) -> None:
    local_rank.setenv("LOCAL_RANK", "2")
    with accelerators(2), pytest.raises(ValueError, match="at most 2 processes a machine"):
        process_device("cuda")
    with accelerators(1):  # a launcher that shows each process its own device alone
        assert process_device("cuda") == torch.device("cuda:0")


def test_no_such_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = torch.randn(8, 2)
    for wrong in ("cuda", "gpu"):
        if wrong == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=f"device is '{wrong}', which this torch cannot use"):
            tb.fit(torch.nn.Linear(2, 2), (x, torch.zeros(8).long()), device=wrong, progress=False)
        arguments = ["torchbayes", "train", "--device", wrong, "--out", str(tmp_path / "run")]
        with patch("sys.argv", arguments), pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert "which this torch cannot use" in " ".join(capsys.readouterr().err.split())


def test_back_ends() -> None:
    assert distributed.back_ends(torch.device("cpu")) == "cpu:gloo"
    assert distributed.back_ends(torch.device("cuda:3")) == "cpu:gloo,cuda:nccl"
    assert distributed.back_ends(torch.device("xpu")) == "cpu:gloo,xpu:xccl"
    with pytest.raises(ValueError, match="no back end for meta devices"):
        distributed.back_ends(torch.device("meta"))


def _simulated(folder: str) -> None:
    """One of two processes on a machine that claims to have two GPUs."""
    rank = int(os.environ["RANK"])
    begun: list[tuple[str, int]] = []
    make = dist.init_process_group

    def init(back_end: str, **how: object) -> None:
        begun.append((back_end, torch.accelerator.current_device_index()))
        make("cpu:gloo", **how)  # type: ignore[arg-type]

    found: dict[str, object] = {}
    with accelerators(2), patch.object(dist, "init_process_group", init):
        with distributed.process_group("cuda"):
            found["device"] = str(process_device("cuda"))
            distributed.refuse_shared(process_device("cuda"))
            try:
                distributed.refuse_shared(torch.device("cuda:0"))
            except ValueError as error:
                found["shared"] = str(error)
        with distributed.process_group("cpu"):  # the accelerators stay as they are
            distributed.refuse_shared(torch.device("cpu"))
    found["begun"] = begun
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def test_two_processes_on_two_devices(tmp_path: Path) -> None:
    """Each sets its own device before it joins the group; two on one device are told so."""
    done = processes(2, _simulated, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["device"] == f"cuda:{rank}"
        assert found["begun"] == [["cpu:gloo,cuda:nccl", rank], ["cpu:gloo", rank]]
        assert "processes 0 and 1 compute on the same accelerator" in found["shared"]


def _run_main() -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())  # type: ignore[func-returns-value]
    assert not ended.value.code


def test_command_line_device(tmp_path: Path) -> None:
    """--device is taken by training, scoring and predicting."""
    run, table = tmp_path / "run", tmp_path / "new.csv"
    rows = "\n".join(f"{i},{i % 3},{2 * i}" for i in range(20))
    table.write_text(f"a,b,c\n{rows}\n")
    asked: list[object] = []
    real = device_module.process_device

    def noted(given: object = None, own: object = None) -> torch.device:
        asked.append(given)
        return real(given, own)  # type: ignore[arg-type]

    for command in (
        ["train", "--data", f"table:{table}", "--epochs", "1", "--out", str(run)],
        ["evaluate", str(run)],
        ["predict", str(run), str(table)],
    ):
        asked.clear()
        with (
            patch("sys.argv", ["torchbayes", *command, "--device", "cpu"]),
            patch.object(device_module, "process_device", noted),
        ):
            _run_main()
        assert "cpu" in map(str, asked), command
