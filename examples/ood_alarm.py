"""An alarm for inputs that are like nothing in the training set.

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
    # The threshold: above the entropy of 95 % of held-out images of the right kind.
    usual = run.predict(make_loader(data, data.validation, 500)).entropy
    alarm = float(usual.quantile(0.95))

    known = run.predict(make_loader(data, data.test, 500)).entropy
    foreign = ood_for(data)  # digits whose tiles have changed places
    strange = run.predict(Normalise(data.mean, data.std)(foreign.inputs, torch.Generator())).entropy
    print(f"false alarms on {(known > alarm).float().mean():.1%} of the test images")
    print(f"alarms on {(strange > alarm).float().mean():.1%} of {foreign.name} ones")
    print(f"AUROC {metrics.auroc(known, strange):.3f}")


if __name__ == "__main__":
    main()
