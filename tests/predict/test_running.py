"""The course of a prediction over its draws, against draws that are all kept."""

from __future__ import annotations

import pytest
import torch

import torchbayes as tb
from torchbayes.predict.running import RunningCategorical, RunningPredictive


def model_and_posterior(width: int) -> tuple[torch.nn.Module, tb.Gaussian]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    )
    mean = tb.snapshot(model)
    return model, tb.Gaussian(mean, {name: torch.full_like(t, 0.4) for name, t in mean.items()})


# Narrow: the draws run together through vmap. Wide: one by one, and the examples in pieces.
@pytest.mark.parametrize("width", [5, 8_000])
@pytest.mark.parametrize("samples", [1, 2, 7, 16])
def test_stages_are_the_averages_of_the_first_draws(width: int, samples: int) -> None:
    model, posterior = model_and_posterior(width)
    inputs = torch.randn(300, 4, generator=torch.Generator().manual_seed(1))
    seed = torch.Generator().manual_seed(2)
    p = tb.predictive(model, posterior, inputs, samples, RunningCategorical(), seed)
    assert isinstance(p, RunningPredictive)
    weights = posterior.draws(samples, torch.Generator().manual_seed(2))
    with torch.no_grad():
        each = torch.stack(
            [torch.func.functional_call(model, draw, (inputs,)).softmax(1) for draw in weights]
        )
    counts = [n for n in (1, 2, 4, 8, 16) if n < samples] + [samples]
    assert list(p.stages) == counts
    for count, probs in p.stages.items():
        assert torch.allclose(probs, each[:count].mean(0), atol=1e-5)
    plain = tb.predictive(
        model, posterior, inputs, samples, generator=torch.Generator().manual_seed(2)
    )
    assert torch.allclose(plain.probs, p.probs)
    assert torch.allclose(plain.aleatoric, p.aleatoric)


def test_a_finite_posterior_stops_at_its_members() -> None:
    model, posterior = model_and_posterior(5)
    samples = tb.Samples()
    for draw in posterior.draws(3, torch.Generator().manual_seed(0)):
        samples.append(draw)
    loader = [(torch.randn(10, 4), torch.zeros(10)), (torch.randn(4, 4), torch.zeros(4))]
    p = tb.predictive(model, samples, loader, 32, RunningCategorical())
    assert isinstance(p, RunningPredictive)
    assert {n: len(probs) for n, probs in p.stages.items()} == {1: 14, 2: 14, 3: 14}
