"""The README's Python runs as it stands and learns something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb

from .conformance.problems import blobs, small_net

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    inputs, targets = (tensor.repeat_interleave(20, 0) for tensor in blobs())
    fresh, truth = blobs(seed=1)
    train_set = TensorDataset(inputs, targets)
    names = {
        "tb": tb, "F": F, "model": small_net(), "make_model": small_net, "train_set": train_set,
        "loader": DataLoader(train_set, 32, shuffle=True), "inputs": inputs, "targets": targets,
        "new_inputs": fresh,
    }  # fmt: skip
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), names)
    assert (names["p"].prediction == truth).float().mean() > 0.9


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 2
