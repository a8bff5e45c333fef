"""`kill -9` in mid-training, ten times at random moments: the result is bit-equal all the same."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

import torchbayes as tb
from torchbayes.train.run_folder import RunFolder

from ..conformance.problems import blobs, small_net
from ..processes import forkserver

SETTINGS = {"method": "dropout", "epochs": 40, "batch_size": 8, "progress": False}


def train(folder: str) -> None:
    """What the child does: every step is followed by a checkpoint, so kills meet half-written ones."""
    torch.set_num_threads(1)
    tb.fit(small_net, blobs(), folder=folder, resume=True, checkpoint_seconds=0.0, **SETTINGS)


def test_ten_kills(tmp_path: Path) -> None:
    context = forkserver()
    moments = random.Random(0)
    kills = 0
    checkpoint = tmp_path / "killed" / "checkpoint.safetensors"
    while kills < 10:
        seen = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        child = context.Process(target=train, args=(str(tmp_path / "killed"),))
        child.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if checkpoint.exists() and checkpoint.stat().st_mtime_ns != seen:
                break  # it trains
            time.sleep(0.005)
        time.sleep(moments.uniform(0.0, 0.3))
        child.kill()
        child.join()
        assert child.exitcode == -9, f"the run ended before kill {kills + 1}: make it longer"
        kills += 1
    before = RunFolder(tmp_path / "killed").checkpoint.read()
    assert before is not None
    assert before["epoch"] > 0, "the kills came too early to meet a half-finished run"
    child = context.Process(target=train, args=(str(tmp_path / "killed"),))
    child.start()
    child.join()
    assert child.exitcode == 0
    whole = tb.fit(small_net, blobs(), folder=tmp_path / "whole", **SETTINGS)
    killed = tb.load(tmp_path / "killed" / "posterior.safetensors", small_net())
    for name, tensor in whole.posterior.mean().items():
        assert torch.equal(tensor, killed.mean()[name]), name
    assert not list((tmp_path / "killed").glob(".*.part"))  # what the kills left is cleared away
