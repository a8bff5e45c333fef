"""Draw the VOGN paper's picture: decision boundaries of the mean and of draws, and the entropy.

Run: python examples/vogn_2d.py          (writes docs/images/vogn_2d.png)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import torchbayes as tb
from torchbayes.models import mlp

METHODS = {
    "Adam": ("map", {"lr": 0.01, "prior": 0.1}),
    "VOGN": ("vogn", {"lr": 0.005, "prior": 4.0, "damping": 0.0, "mc_samples": 4,
                      "temperature": 0.1, "temperature_steps": 0, "betas": (0.9, 0.02)}),
}  # fmt: skip


def main(path: Path) -> None:
    data = tb.load_data("moons")
    inputs, targets = data.train.inputs[:150], data.train.targets[:150]
    size = 120
    lines = torch.linspace(-3.5, 4.5, size), torch.linspace(-3.5, 4.0, size)
    grid = torch.cartesian_prod(*lines)

    figure = Figure(figsize=(9, 7), dpi=110, layout="constrained")
    rows = figure.subplots(2, len(METHODS), sharex=True, sharey=True)
    for (above, below), (title, (method, options)) in zip(rows.T, METHODS.items(), strict=True):
        torch.manual_seed(0)
        net = mlp(2, num_classes=2, hidden=(30, 30))
        run = tb.fit(net, (inputs, targets), method, epochs=600, batch_size=150,
                     schedule="cosine", progress=False, **options)  # fmt: skip
        mean = tb.predictive(run.model, tb.Point(run.posterior.mean()), grid, samples=1)
        for draw in run.posterior.draws(20, torch.Generator().manual_seed(0)):
            probs = tb.predictive(run.model, tb.Point(draw), grid, samples=1).probs[:, 1]
            above.contour(
                *lines, probs.view(size, size).T, levels=[0.5], colors="#f4a6a6", linewidths=0.8
            )
        above.contour(*lines, mean.probs[:, 1].view(size, size).T, levels=[0.5], colors="#c00000")
        entropy = run.predict(grid, samples=100).entropy.view(size, size).T
        shades = below.contourf(*lines, entropy, levels=torch.linspace(0, 0.7, 15), cmap="Blues_r")
        for axis in (above, below):
            for label, colour in enumerate(("#4dbd74", "#e69f00")):
                axis.scatter(*inputs[targets == label].T, s=8, color=colour, linewidths=0)
        above.set_title(f"{title}: boundary of the mean and of draws", fontsize=11)
        below.set_title(f"{title}: entropy of the prediction", fontsize=10)
    figure.colorbar(shades, ax=rows[1].tolist(), ticks=[0, 0.35, 0.69]).set_label("nats")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/images/vogn_2d.png"))
