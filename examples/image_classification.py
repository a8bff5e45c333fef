"""Classify images, and know which answers to trust.

Run: python examples/image_classification.py
"""

from __future__ import annotations

import torchbayes as tb
from torchbayes.data import make_loader
from torchbayes.models import mlp


def main() -> None:
    data = tb.load_data("digits", validation=0.25)
    run = tb.fit(
        lambda: mlp(64, num_classes=10, hidden=(64,)), make_loader(data, data.train, 64, shuffle=True),
        method="ensemble", epochs=15, members=3, lr=3e-3, progress=False,
    )  # fmt: skip
    held_out = run.predict(make_loader(data, data.validation, 500))
    test = run.predict(make_loader(data, data.test, 500))
    right = test.prediction == data.test.targets
    print(f"{right.float().mean():.1%} accuracy on {len(right)} test images")

    # Answer only where it is safe: at most 5 % wrong answers, guaranteed with probability 95 %.
    rule = tb.posthoc.abstain(held_out, data.validation.targets, risk=0.05)
    answered = rule(test)
    print(
        f"answers {answered.float().mean():.1%} of them, with {right[answered].float().mean():.1%} accuracy"
    )

    # Or predict sets of classes that contain the true one 95 times in 100.
    sets = tb.posthoc.conformal_sets(held_out, data.validation.targets, coverage=0.95)(test)
    covered = sets.gather(1, data.test.targets[:, None]).float().mean()
    print(
        f"sets of {sets.sum(1).float().mean():.2f} classes contain the true one {covered:.1%} of the time"
    )


if __name__ == "__main__":
    main()
