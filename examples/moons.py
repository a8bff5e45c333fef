"""Where is a network certain? Ordinary training against a deep ensemble, on two half moons.

Run: python examples/moons.py            (writes docs/images/moons.png, the picture in the README)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import torchbayes as tb
from torchbayes.models import mlp

METHODS = {"map": "one network", "ensemble": "deep ensemble of five"}


def main(path: Path) -> None:
    data = tb.load_data("moons")
    inputs, targets = data.train.inputs, data.train.targets
    lines = torch.linspace(-3.5, 4.5, 120), torch.linspace(-3.5, 4.0, 120)
    grid = torch.cartesian_prod(*lines)

    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(METHODS), sharey=True)
    for axis, (method, title) in zip(axes, METHODS.items(), strict=True):
        run = tb.fit(
            lambda: mlp(2, num_classes=2, hidden=(50, 50)), (inputs, targets), method, epochs=100,
            batch_size=64, lr=0.01, prior=0.1, progress=False,
        )  # fmt: skip
        prediction = run.predict(grid, samples=50)
        entropy = prediction.entropy.view(120, 120).T
        shades = axis.contourf(*lines, entropy, levels=torch.linspace(0, 0.7, 15), cmap="Blues_r")
        axis.contour(*lines, prediction.probs[:, 1].view(120, 120).T, levels=[0.5], colors="black")
        for label, colour in enumerate(("#e69f00", "#d55e00")):
            points = inputs[targets == label]
            axis.scatter(*points.T, s=6, color=colour, linewidths=0)
        axis.set_title(f"{method}: {title}")
        axis.set_xticks([])
        axis.set_yticks([])
    bar = figure.colorbar(shades, ax=axes, ticks=[0, 0.35, 0.69])
    bar.set_label("entropy of the prediction (nats)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/images/moons.png"))
