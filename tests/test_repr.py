"""What is printed: one line, with the figures that matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Cauchy

import torchbayes as tb
from torchbayes.models import wide_resnet


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def test_predictions() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.7, 0.3]])
    p: Any = tb.ClassPredictive(probs, torch.tensor([0.1, 0.2]), 32)
    epistemic = (torch.special.entr(probs).sum(1) - torch.tensor([0.1, 0.2])).mean()
    assert repr(p) == (
        "ClassPredictive(2 examples, 2 classes, 32 draws: mean confidence 0.8, mean epistemic "
        f"{epistemic:.3g})"
    )
    maps = tb.Categorical().predictive(torch.zeros(1, 1, 3, 4, 5))
    assert "(1 example, 3 classes, 4 × 5 positions, 1 draw: mean confidence 0.333" in repr(maps)
    p = tb.Bernoulli().predictive(torch.zeros(2, 5, 3))
    assert repr(p).startswith("BinaryPredictive(5 examples, 3 labels, 2 draws: mean confidence 0.5")
    p = tb.GaussianNoise(0.3).predictive(torch.tensor([[[0.0]], [[0.8]]]))
    assert repr(p) == ("RegressionPredictive(1 example, 2 draws: mean std 0.5, mean epistemic 0.4)")
    p = tb.GaussianNoise(predicted=True).predictive(torch.zeros(1, 5, 4))
    assert "(5 examples, 2 numbers, 1 draw: mean std 1, mean epistemic 0)" in repr(p)
    p = tb.likelihood.Observation(lambda out: Cauchy(out, 1.0)).predictive(torch.zeros(1, 5, 1))
    assert "5 examples" in repr(p)


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (lambda: tb.MeanField(net()), "MeanField(Sequential, 131 random weights, shared_draw"),
        (lambda: tb.MCDropout(net(), p=0.2), "MCDropout(Sequential, dropout after 0 with p=0.2)"),
        (lambda: tb.VBLL(net(), train_size=9), "VBLL(Sequential, "),
        (lambda: tb.Hypernet(wide_resnet(10, 1)), "Hypernet(WideResNet, 76,288 generated weights"),
    ],
)
def test_wrappers(thing: Any, expected: str) -> None:
    said = repr(thing())
    assert said.startswith(expected)
    assert "\n" not in said


@pytest.mark.parametrize("name", tb.optim.__all__)
def test_optimisers(name: str) -> None:
    cls, model = getattr(tb.optim, name), net()
    more = {} if name == "MLE" else {"train_size": 100}
    said = repr(cls(model, lr=0.25, **more))
    assert said.startswith(f"{name}(131 weights of Sequential: ")
    assert "lr=0.25" in said
    assert "\n" not in said
    assert "None" not in said
    groups = [{"params": ["0.weight", "0.bias"]}, {"params": ["2.weight", "2.bias"]}]
    assert "131 weights of Sequential in 2 groups" in repr(cls(model, params=groups, **more))


def test_a_run_says_what_it_is_and_its_history_whose_epochs_they_are() -> None:
    x = torch.randn(40, 4)
    data = x, x.argmax(1) % 3
    run = tb.fit(net, data, "ensemble", members=2, epochs=3, progress=False)
    assert repr(run).startswith("Run(ensemble, 6 epochs in ")
    assert repr(run).endswith("s: Samples(2 snapshots of Sequential, in memory), Categorical)")
    assert [row["member"] for row in run.history] == [0, 0, 0, 1, 1, 1]
    run = tb.fit(net, data, "sgld", chains=2, epochs=2, progress=False)
    assert [row["chain"] for row in run.history] == [0, 0, 1, 1]
