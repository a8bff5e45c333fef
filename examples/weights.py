"""Draw histograms of weights trained by SGD, dropout and Bayes by Backprop, and their signal-to-noise ratio.

Run: python examples/weights.py              (writes docs/images/weights.png and signal-to-noise.png)
"""

from __future__ import annotations

import sys
from pathlib import Path

from figures.weights import snr_figure, weight_figure

import torchbayes as tb
from torchbayes.data.transform import Normalise
from torchbayes.models import mlp

METHODS = {
    "SGD": ("mle", {"optimizer": "sgd", "lr": 0.05}),
    "dropout": ("dropout", {"optimizer": "sgd", "lr": 0.05, "p": 0.5, "prior": 0.0}),
    "Bayes by Backprop": ("bbb", {"prior": tb.ScaleMixturePrior(), "lr": 0.003}),
}


def main(folder: Path) -> None:
    data = tb.load_data("digits")
    inputs = Normalise(data.mean, data.std)(data.train.inputs)
    posteriors = {}
    for title, (method, options) in METHODS.items():
        run = tb.fit(
            lambda: mlp(64, hidden=(200, 200)), (inputs, data.train.targets), method, epochs=60,
            batch_size=64, progress=False, **options,
        )  # fmt: skip
        posteriors[title] = run.posterior
    folder.mkdir(parents=True, exist_ok=True)
    weight_figure(run.model, posteriors).savefig(folder / "weights.png", dpi=110)
    gaussian = {title: q for title, q in posteriors.items() if isinstance(q, tb.Gaussian)}
    snr_figure(gaussian).savefig(folder / "signal-to-noise.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/images"))
