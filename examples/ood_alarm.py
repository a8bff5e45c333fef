"""Raise an alarm for inputs unlike anything in the training set.

Run: python examples/ood_alarm.py
"""

from __future__ import annotations

import torch

import torchbayes as tb
from torchbayes import metrics
from torchbayes.data import make_loader, ood_for
from torchbayes.data.transform import Normalise
from torchbayes.models import mlp


def main() -> None:
    data = tb.load_data("digits", validation=0.25)
    run = tb.fit(
        lambda: mlp(64, num_classes=10, hidden=(64,)), make_loader(data, data.train, 64, shuffle=True),
        method="ensemble", epochs=15, members=3, lr=3e-3, progress=False,
    )  # fmt: skip
    # The threshold: the 95 % quantile of the entropy on held-out images of the familiar kind.
    usual = run.predict(make_loader(data, data.validation, 500)).entropy
    alarm = float(usual.quantile(0.95))

    known = run.predict(make_loader(data, data.test, 500)).entropy
    foreign = ood_for(data)  # digits with their tiles shuffled
    strange = run.predict(Normalise(data.mean, data.std)(foreign.inputs, torch.Generator())).entropy
    print(f"false alarms on {(known > alarm).float().mean():.1%} of the test images")
    print(f"alarms on {(strange > alarm).float().mean():.1%} of {foreign.name} images")
    print(f"AUROC {metrics.auroc(known, strange):.3f}")


if __name__ == "__main__":
    main()
