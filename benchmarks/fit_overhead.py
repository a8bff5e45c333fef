"""What `fit` costs on top of a bare loop: LeNet-5 on 3×32×32, batch 128, tensors in memory.

Run: python benchmarks/fit_overhead.py
Prints the time of `fit` relative to the bare loop (goal: at most 1.1), measured in turns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved, ratios, show

import torchbayes as tb
from torchbayes.data import make_loader
from torchbayes.data.dataset import DataSet, Split
from torchbayes.models import lenet5

BATCH, COUNT = 128, 128 * 40


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (COUNT, 3, 32, 32), dtype=torch.uint8, generator=generator)
    targets = torch.randint(0, 10, (COUNT,), generator=generator)
    floats = images.float().div_(255)

    def bare() -> None:
        model = lenet5(in_channels=3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        for start in range(0, COUNT, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(
                model(floats[start : start + BATCH]), targets[start : start + BATCH]
            ).backward()
            optimizer.step()

    split = Split(images, targets)
    data = DataSet(
        name="random", train=split, validation=None, test=split,
        classes=tuple("0123456789"), shape=(3, 32, 32),
        mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25),
    )  # fmt: skip
    loader = make_loader(data, split, BATCH, shuffle=True)

    def fit() -> None:
        tb.fit(lambda: lenet5(in_channels=3), loader, "map", epochs=1, progress=False)

    def fit_with_folder_and_bar() -> None:
        with tempfile.TemporaryDirectory() as folder:
            tb.fit(
                lambda: lenet5(in_channels=3), loader, "map", epochs=1, folder=Path(folder) / "r"
            )

    jobs = {"bare loop": bare, "fit": fit, "fit, run folder, progress bar": fit_with_folder_and_bar}
    show(
        "LeNet-5, batch 128, relative to the bare loop",
        ratios(interleaved(jobs, rounds=15), "bare loop"),
    )


if __name__ == "__main__":
    main()
