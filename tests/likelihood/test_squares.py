"""VOGN's squares of single examples' gradients under every likelihood, against a loop over the examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.curvature import Capture
from torchbayes.train.method import loss_of

N = 9


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def mapped(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, outputs, 1))


FLAT, IMAGES = (N, 4), (N, 1, 4, 4)
SOME = torch.tensor([0, 2, -1, 1, 1, -1, 0, -1, 2])
CASES: dict[str, tuple[tb.Likelihood, nn.Module, tuple[int, ...], Tensor]] = {
    "classes": (tb.Categorical(), dense(3), FLAT, torch.arange(N) % 3),
    "class weights": (
        tb.Categorical(class_weight=[0.5, 1.0, 4.0]), dense(3), FLAT, torch.arange(N) % 3
    ),
    "ignored rows": (tb.Categorical(ignore_index=-1), dense(3), FLAT, SOME),
    "maps": (
        tb.Categorical(ignore_index=2, class_weight=[1.0, 3.0, 9.0]), mapped(3), IMAGES,
        torch.randint(3, (N, 4, 4), generator=seeded()),
    ),
    "binary": (tb.Bernoulli(2.0), dense(1), FLAT, torch.arange(N) % 2),
    "multi-label": (
        tb.Bernoulli(), dense(3), FLAT, torch.randint(2, (N, 3), generator=seeded())
    ),
    "counts": (tb.Poisson(), dense(1), FLAT, torch.arange(N)),
    "heavy tails": (tb.StudentT(3.0), dense(2), FLAT, torch.randn(N, 2, generator=seeded())),
    "noise": (
        tb.GaussianNoise(predicted=True), dense(4), FLAT, torch.randn(N, 2, generator=seeded())
    ),
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_squares_are_those_of_a_loop_over_the_examples(name: str, weighted: bool) -> None:
    likelihood, net, shape, targets = CASES[name]
    likelihood, net = likelihood.double(), net.double()
    targets = targets.double() if targets.is_floating_point() else targets
    x = torch.randn(shape, generator=seeded(1), dtype=torch.float64)
    weights = torch.rand(N, generator=seeded(2), dtype=torch.float64) if weighted else None
    parameters = dict(net.named_parameters())
    wanted = {key: torch.zeros_like(p) for key, p in parameters.items()}
    mean = {key: torch.zeros_like(p) for key, p in parameters.items()}
    for i in range(N):  # an ignored example says nothing: its loss is 0
        own = None if weights is None else weights[i : i + 1]
        loss = loss_of(likelihood, net(x[i : i + 1]), targets[i : i + 1], own)
        for (key, _), gradient in zip(
            parameters.items(), torch.autograd.grad(loss, list(parameters.values())), strict=True
        ):
            wanted[key] += gradient.square() / N
            mean[key] += gradient / N
    capture = Capture(net, parameters)
    net.zero_grad()
    with capture.block():
        loss_of(likelihood, net(x), targets, weights).backward()  # type: ignore[no-untyped-call]
    for key, p in parameters.items():
        torch.testing.assert_close(p.grad, mean[key], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(capture.squares(p), wanted[key], rtol=1e-9, atol=1e-12)
