"""Which device a process takes, with accelerators that are only claimed to be there."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchbayes as tb
from torchbayes.cli import main
from torchbayes.core import device as device_module
from torchbayes.core import distributed
from torchbayes.core.device import (
    device_random_state,
    generator_state,
    process_device,
    set_device_random_state,
    take_device,
)
from torchbayes.predict.predictive import own_generator

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


class _Cycle:
    """What only the garbage collection frees; another thread then runs."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(1e-4)


class _Collecting:
    """A generator the making of whose state starts a collection, as that of any object may."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def get_state(self) -> Tensor:
        _Cycle()
        gc.set_threshold(max(1, gc.get_count()[0]))
        try:
            return self.generator.get_state()
        finally:
            gc.set_threshold(10**6)


def _in_threads(what: str) -> None:
    """Let four threads read the state of a generator while four others use it."""
    gc.freeze()  # what is there already need not be searched
    generator = torch.default_generator if "device" in what else torch.Generator()
    state = generator_state(generator)

    def predict() -> None:
        with own_generator(generator) as own:
            torch.rand(3, generator=own)

    uses: dict[str, Callable[[], object]] = {
        "reading": lambda: generator_state(generator),
        "reading the device's": lambda: device_random_state(torch.device("cpu")),
        "predicting": predict,
        "seeding": lambda: generator.manual_seed(1),
        "setting": lambda: generator.set_state(state),
        "setting the device's": lambda: set_device_random_state(torch.device("cpu"), state),
        "drawing": lambda: torch.rand(3, generator=generator),
    }

    def read() -> None:
        for _ in range(100):
            generator_state(_Collecting(generator))  # type: ignore[arg-type]

    def work() -> None:
        while any(reader.is_alive() for reader in readers):
            uses[what]()
            time.sleep(1e-5)

    readers = [threading.Thread(target=read) for _ in range(4)]
    others = [threading.Thread(target=work) for _ in range(4)]
    for thread in [*readers, *others]:
        thread.start()
    for thread in [*readers, *others]:
        thread.join()
    assert gc.isenabled()


THREADS = (
    "reading",
    "reading the device's",
    "predicting",
    "seeding",
    "setting",
    "setting the device's",
    "drawing",
)


@pytest.mark.parametrize("what", THREADS)
def test_threads_with_one_generator(what: str) -> None:
    """torch's own function waits for ever here, with the interpreter's lock: no time limit ends it either."""
    assert processes(1, _in_threads, what, timeout=120).returncode == 0


def test_states_are_read_in_one_place() -> None:
    source = Path(tb.__file__).parent
    reads = re.compile(r"(?<!np\.random)\.(get_state|get_rng_state|initial_seed)\(")
    found = {f.name for f in source.rglob("*.py") if reads.search(f.read_text(encoding="utf-8"))}
    assert found == {"device.py"}
