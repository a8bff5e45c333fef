"""Checkpoints come back bit for bit, notice any damage, and have a generation to fall back to."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import torchbayes as tb
from torchbayes.core.errors import FileError, RunError, WriteError
from torchbayes.core.storage import read_header
from torchbayes.train import checkpoint as module
from torchbayes.train.checkpoint import Checkpoint
from torchbayes.train.run_folder import RunFolder

from ..conformance.problems import blobs, small_net
from ..stopping import StopAfter, Stopped

RANDOM = {"torch": torch.get_rng_state(), "method": torch.Generator().get_state()}


def state(**more: Any) -> dict[str, Any]:
    return {
        "epoch": 1, "batch": 2, "history": [{"epoch": 1, "loss": 0.1}], "sums": {"loss": 0.3},
        "seconds": 1.5, "method": {}, "likelihood": {}, "noise": {}, "scaler": {},
        "random": [RANDOM], **more,
    }  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.stride() == b.stride()
            and torch.equal(torch.view_as_real(a) if a.is_complex() else a,
                            torch.view_as_real(b) if b.is_complex() else b)
        )  # fmt: skip
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_any_state_comes_back_as_it_was(tmp_path: Path) -> None:
    adam = torch.optim.Adam(small_net().parameters(), betas=(0.8, 0.9))
    weights = torch.arange(48.0).reshape(2, 3, 4, 2)
    method = {
        "optimizer": adam.state_dict(),
        "numbers": [0, -1, True, None, 2**70, 0.1, -0.0, math.inf, math.nan, "ε\n"],
        "nested": ({"a": (1, [])}, {}),
        3: OrderedDict(b=torch.tensor(1), a=torch.tensor(2.0, dtype=torch.bfloat16)),
        "strided": weights.to(memory_format=torch.channels_last),
        "row": weights[0, 0, 0],
        "complex": torch.tensor([1 + 2j]),
        "empty": torch.empty(0, 3),
    }
    file = Checkpoint(tmp_path / "checkpoint.safetensors")
    assert file.read() is None
    file.write(state(method=method))
    back = file.read()
    assert back is not None
    assert same(back, state(method=method))
    (group,) = back["method"]["optimizer"]["param_groups"]
    assert group["betas"] == (0.8, 0.9)


def test_a_modules_versions_and_tied_weights(tmp_path: Path) -> None:
    net = nn.Sequential(nn.BatchNorm1d(300), nn.Linear(300, 300), nn.Linear(300, 300))
    net[2].weight = net[1].weight
    file = Checkpoint(tmp_path / "checkpoint.safetensors")
    file.write(state(method=net.state_dict()))
    back = file.read()
    assert back is not None
    assert back["method"]._metadata == net.state_dict()._metadata
    assert (
        file.newest.stat().st_size < 1.2 * 4 * 300 * 300 + 20_000
    )  # the matrix once, and the rest


def test_what_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    file = Checkpoint(tmp_path / "checkpoint.safetensors")
    with pytest.raises(TypeError, match=r"state\.method\.x\.1 is a set"):
        file.write(state(method={"x": [1, {2}]}))
    assert not file.exists()


def test_every_flipped_bit_is_noticed_and_the_generation_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Checkpoint(tmp_path / "checkpoint.safetensors")
    file.write(state(epoch=3, method={"w": torch.ones(100)}))
    file.write(state(epoch=4, method={"w": torch.ones(100)}))
    sound = file.newest.read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        raw = bytearray(sound)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        file.newest.write_bytes(raw)
        caplog.clear()
        back = file.read()
        assert back is not None
        if back["epoch"] == 4:  # white space between tokens
            assert same(back, state(epoch=4, method={"w": torch.ones(100)}))
        else:
            assert back["epoch"] == 3
            assert "going on from the checkpoint before it, of epoch 4" in caplog.text
    for end in (0, 7, 100, len(sound) - 1):
        file.newest.write_bytes(sound[:end])
        back = file.read()
        assert back is not None
        assert back["epoch"] == 3
    file.previous.write_bytes(b"x")
    with pytest.raises(FileError):
        file.read()


def test_a_kill_between_two_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = Checkpoint(tmp_path / "checkpoint.safetensors")
    for epoch in (1, 2):
        file.write(state(epoch=epoch))
    next_ = tmp_path / "checkpoint-next.safetensors"
    file.newest.rename(next_)  # the one before has made room, the new one is not in its place
    file.settle()
    back = file.read()
    assert back is not None
    assert back["epoch"] == 2
    assert not caplog.text
    next_.write_bytes(b"from before")
    file.settle()
    assert not next_.exists()


@pytest.mark.parametrize("key", list(module._SCHEMA))
def test_a_sound_file_without_what_is_needed_is_refused(tmp_path: Path, key: str) -> None:
    file = Checkpoint(tmp_path / "checkpoint.safetensors")
    for wrong in ({k: v for k, v in state().items() if k != key}, state(**{key: "text"})):
        if key == "history" and key not in wrong:
            wrong[key] = {}  # the writer itself needs it
        file.write(wrong)
        file.previous.unlink(missing_ok=True)
        with pytest.raises(RunError, match=rf"no other checkpoint.*no usable '{key}'"):
            file.read()


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    """Another reader than ours finds the tensors."""
    file = Checkpoint(tmp_path / "checkpoint.safetensors")
    file.write(state(method={"w": torch.tensor([1.0, 2.0])}))
    header = read_header(file.newest)
    assert header is not None
    name = json.loads(json.dumps(header["state"]))[6][1][1][1][1]
    with safe_open(str(file.newest), framework="np") as opened:
        assert opened.get_tensor(name).tolist() == [1.0, 2.0]


SETTINGS: dict[str, Any] = {
    "method": "dropout", "epochs": 2, "batch_size": 24, "progress": False, "checkpoint_seconds": 0.0,
}  # fmt: skip


def test_a_damaged_generation_costs_nothing_but_time(tmp_path: Path) -> None:
    whole = tb.fit(small_net, blobs(), folder=tmp_path / "whole", **SETTINGS)
    with pytest.raises(Stopped):
        tb.fit(
            small_net, blobs(), folder=tmp_path / "run", **{**SETTINGS, "progress": StopAfter(7)}
        )
    newest = RunFolder(tmp_path / "run").checkpoint.newest
    raw = bytearray(newest.read_bytes())
    raw[-9] ^= 64
    newest.write_bytes(raw)
    again = tb.fit(small_net, blobs(), folder=tmp_path / "run", resume=True, **SETTINGS)
    for name, tensor in whole.posterior.mean().items():
        assert torch.equal(tensor, again.posterior.mean()[name])


def test_a_full_disk_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with pytest.raises(Stopped):
        tb.fit(small_net, blobs(), folder=tmp_path, **{**SETTINGS, "progress": StopAfter(3)})
    before = RunFolder(tmp_path).checkpoint.newest.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("torchbayes.core.storage._bytes", full)
        patch.setattr("torchbayes.core.storage.checksum", lambda *_: 0)
        patch.setattr(Checkpoint, "read", lambda self: None)
        with pytest.raises(WriteError, match="No space left on device"):
            tb.fit(small_net, blobs(), folder=tmp_path, resume=True, **SETTINGS)
    assert RunFolder(tmp_path).checkpoint.newest.read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))
