"""Learn one task after another: the posterior of each is the prior of the next.

Run: python examples/continual_learning.py
"""

from __future__ import annotations

import torch

import torchbayes as tb
from torchbayes.applications.continual import SETTINGS, learn_tasks
from torchbayes.applications.tasks import permuted_tasks
from torchbayes.models import mlp


def main() -> None:
    tasks = permuted_tasks(tb.load_data("digits"), 3)  # each has the pixels in another order
    for method, options in (("map", {"lr": 3e-3}), ("vogn", SETTINGS["vogn"])):
        torch.manual_seed(0)
        network = mlp(64, num_classes=10, hidden=(100,))
        scores = learn_tasks(network, tasks, method, epochs=20, batch_size=64, **options)
        last = ", ".join(f"{share:.1%}" for share in scores.accuracy[-1])
        print(f"{method}: accuracy {last} on the three tasks, {scores.forgotten:.1%} forgotten")


if __name__ == "__main__":
    main()
