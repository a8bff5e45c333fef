"""A 32-draw prediction of 1,000 images against 32 plain forward passes of the same images, in turns.

Run: python benchmarks/predict.py
"""

from __future__ import annotations

import torch
from timing import interleaved, ratios, show
from torch import nn

import torchbayes as tb
from torchbayes.models import lenet5, mlp, resnet20

DRAWS, COUNT = 32, 1000


def measure(name: str, model: nn.Module, inputs: torch.Tensor, rounds: int) -> None:
    model.eval()
    mean = tb.snapshot(model)
    std = {n: torch.full_like(p, 0.01) for n, p in model.named_parameters()}
    posteriors = {"Gaussian": tb.Gaussian(mean, std), "Samples": tb.Samples(model)}
    for _ in range(DRAWS):
        posteriors["Samples"].append()

    @torch.no_grad()
    def plain() -> None:
        for _ in range(DRAWS):
            model(inputs).softmax(1)

    jobs = {f"{DRAWS} plain forwards": plain}
    for kind, posterior in posteriors.items():
        jobs[f"predictive, {kind}"] = lambda p=posterior: tb.predictive(model, p, inputs, DRAWS)
    show(
        f"{name}, {len(inputs)} inputs",
        ratios(interleaved(jobs, rounds=rounds, warmup=1), next(iter(jobs))),
    )


def main() -> None:
    torch.manual_seed(0)
    measure("MLP 64-200-200-10", mlp(64, hidden=(200, 200)), torch.randn(COUNT, 64), 15)
    measure("MLP 784-1200-1200-10", mlp(784), torch.randn(COUNT, 784), 9)
    measure("LeNet-5 3×32×32", lenet5(in_channels=3), torch.randn(COUNT, 3, 32, 32), 9)
    measure("ResNet-20 without norm", resnet20(batch_norm=False), torch.randn(COUNT, 3, 32, 32), 3)


if __name__ == "__main__":
    main()
