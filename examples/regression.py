"""A regression curve with its uncertainty band: Bayes by Backprop on the paper's toy data.

Run: python examples/regression.py [PICTURE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import torchbayes as tb
from torchbayes.data.builtin import curve_data, toy_curve
from torchbayes.models import mlp
from torchbayes.plots.curve import regression_figure


def main(picture: Path | None) -> None:
    x, y = curve_data(400, generator=torch.Generator().manual_seed(0))
    scale = lambda inputs: (inputs - 0.25) / 0.15  # noqa: E731
    run = tb.fit(  # learns how much noise the targets have
        lambda: mlp(1, num_classes=1, hidden=(16, 16)), (scale(x), y), method="bbb", epochs=150,
        lr=0.01, init_std=0.02, schedule="cosine", progress=False,
    )  # fmt: skip
    p = run.predict(scale(torch.tensor([[0.25], [1.0]])), samples=200)
    for place, mean, std, doubt in zip((0.25, 1.0), p.mean, p.std, p.epistemic, strict=True):
        print(
            f"x = {place}: {float(mean):.2f} ± {float(std):.2f}, of which {float(doubt):.2f} epistemic"
        )
    if picture is not None:
        figure = regression_figure(
            run.model,
            run.posterior,
            x,
            y,
            likelihood=run.likelihood,
            truth=toy_curve,
            transform=scale,
        )
        figure.savefig(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
