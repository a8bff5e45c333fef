"""How many files a reader has to open to follow one batch of VOGN."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import torchbayes as tb

SOURCE = Path(tb.__file__).parent

# Fetching the next batch, watching its loss and speed, drawing the progress bar and the course of the
# learning rate, which is a scheduler's work, are no part of the update.
BESIDE = (
    "data/",
    "train/guard.py",
    "train/progress.py",
    "train/throughput.py",
    "core/planned_rate.py",
)


class Watched(nn.Sequential):
    """A network that notes which files run from one of its forward passes to the next.

    That is one turn of the training loop, from the middle of one batch to the middle of the next, and it does
    not depend on what the loop's functions are called. Backward passes on a CPU run in the same thread.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.calls = 0
        self.visits: list[str] = []

    def note(self, frame: FrameType, event: str, _arg: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and SOURCE in file.parents:
            self.visits.append(file.relative_to(SOURCE).as_posix())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 6:
            sys.setprofile(self.note)
        elif self.calls == 7:
            sys.setprofile(None)
        return super().forward(x)


def test_a_batch_of_vogn_passes_few_files() -> None:
    torch.manual_seed(0)
    net = Watched(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    data = torch.randn(640, 784), torch.randint(10, (640,))
    try:
        tb.fit(net, data, method="vogn", epochs=1, batch_size=64, in_place=True, progress=False)
    finally:
        sys.setprofile(None)
    visits = [file for file in net.visits if not file.startswith(BESIDE)]
    changes = sum(a != b for a, b in itertools.pairwise(visits))
    files = sorted(set(visits))
    assert "optim/vogn.py" in files, "nothing was seen of the update"
    curvature = [file for file in files if file.startswith("curvature/")]
    assert len(curvature) <= 3, curvature
    # One of them draws for weights that are too few for a loop, because each fan-in has a bound of its own,
    # and one checks that gradients are finite.
    assert len(files) <= 14, f"{len(files)} files, {changes} changes of file: {files}"
