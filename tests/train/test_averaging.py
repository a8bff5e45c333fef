"""Cyclical learning rates, and the methods that average the ends of their cycles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.posterior import Weights, snapshot
from torchbayes.train.averaging import AveragingMethod
from torchbayes.train.method import Plan
from torchbayes.train.registry import METHODS

AVERAGING = [name for name, cls in METHODS.items() if issubclass(cls, AveragingMethod)]


def rates(schedule: tb.Schedule, epochs: int, steps: int, lr: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, seen = schedule.build(optimizer, epochs, steps), []
    for _ in range(epochs * steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cyclic_rates_are_cosines_with_restarts() -> None:
    """h_t = h₀·½[1 + cos(π·mod(t, n)/n)], n = 15/3 updates a cycle, scaled to end at `low`."""
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t % 5) / 5)) for t in range(15)]
    assert rates(tb.Schedule("cyclic", cycles=3, low=0.1), 5, 3) == pytest.approx(expected)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, eta_min=0.1)
    for rate in expected:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.step()
        torchs.step()


@pytest.mark.parametrize(
    ("cycles", "epochs", "steps"), [(3, 5, 3), (4, 3, 7), (7, 2, 5), (30, 2, 5)]
)
def test_cycles_fill_the_run(cycles: int, epochs: int, steps: int) -> None:
    schedule = tb.Schedule("cyclic", cycles=cycles)
    ends, total = schedule.cycle_ends(epochs, steps), epochs * steps
    assert ends[-1] == total
    assert len(ends) == min(cycles, total)
    lengths = np.diff((0, *ends))
    assert lengths.max() - lengths.min() <= 1
    restarts = [t for t, rate in enumerate(rates(schedule, epochs, steps)) if rate == 1.0]
    assert restarts == [0, *ends[:-1]]


def test_cycles_begin_after_the_warm_up() -> None:
    schedule = tb.Schedule("cyclic", cycles=2, warmup_epochs=2)
    assert schedule.cycle_ends(10, 1) == (6, 10)
    seen = rates(schedule, 10, 1)
    assert seen[0] == pytest.approx(0.01)
    assert seen[2] == seen[6] == pytest.approx(1.0)
    assert seen[5] < seen[4] < seen[3] < 1


def test_other_schedules_have_no_cycles() -> None:
    assert tb.Schedule("cosine").cycle_ends(3, 4) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"cycles": 0}, "cycles is 0"), ({"low": 1.5}, "low is 1.5"), ({"low": -0.1}, "low is -0.1")],
)
def test_schedule_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tb.Schedule("cyclic", **options)


def blobs(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(count) % 2
    return torch.randn(count, 3, generator=generator) + 2 * targets[:, None], targets


def run_method(
    name: str, epochs: int, steps: int, **options: Any
) -> tuple[AveragingMethod, list[float], list[Weights]]:
    """Drive a method by hand, noting the learning rate and the weights of every update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    plan = Plan(60, epochs, steps, torch.Generator().manual_seed(0), lambda: model)
    method = METHODS[name](model, tb.Categorical(), plan, **options)
    assert isinstance(method, AveragingMethod)
    inputs, targets = blobs()
    lrs, path = [], []
    for epoch in range(epochs):
        method.begin_epoch(epoch)
        for _ in range(steps):
            lrs.append(method.optimizer.param_groups[0]["lr"])

            def closure() -> Tensor:
                method.optimizer.zero_grad()
                loss = method.loss(inputs, targets)
                loss.backward()
                return loss

            method.step(closure)
            path.append(centre(method))
        method.end_epoch(epoch, [inputs])
    return method, lrs, path


def centre(method: AveragingMethod) -> Weights:
    """The weights that the method averages, as they are now."""
    inner = getattr(method.module, "posterior", None)
    return snapshot(method.model) if inner is None else inner().mean()


@pytest.mark.parametrize("name", AVERAGING)
def test_averages_the_ends_of_the_cycles(name: str) -> None:
    method, lrs, path = run_method(name, 10, 4, lr=0.05, start=0.4, cycles=3, low=0.1, swa_lr=0.02)
    assert lrs[:16] == [0.05] * 16  # four of ten epochs as usual
    assert lrs[16:] == pytest.approx(rates(tb.Schedule("cyclic", cycles=3, low=0.1), 6, 4, 0.02))
    ends = [16 + end for end in (8, 16, 24)]
    assert len(method.averager) == 3
    mean = method.posterior().mean()
    for key in mean:
        expected = np.mean([path[end - 1][key].double().numpy() for end in ends], 0)
        np.testing.assert_allclose(mean[key], expected, rtol=1e-4, atol=1e-6)


def test_hwa_keeps_the_mean_fields_own_variance() -> None:
    method, _, _ = run_method(
        "hwa",
        2,
        5,
        lr=0.0001,
        start=0.5,
        cycles=5,
        init_std=0.3,
        kl_schedule="linear",
        kl_warmup=1.0,
    )
    drawn = method.module.posterior().std()  # hardly moved at this learning rate
    for name, std in method.posterior().std().items():
        torch.testing.assert_close(std, drawn[name], rtol=0.02, atol=0.0)


@pytest.mark.parametrize("name", ["swag", "hwa"])
def test_rank_is_an_option(name: str) -> None:
    run = tb.fit(nn.Linear(3, 2), blobs(), name, epochs=8, rank=4, cycles=6, progress=False)
    assert isinstance(run.posterior, tb.LowRankGaussian)
    assert run.posterior.rank == 4
    diagonal = tb.fit(nn.Linear(3, 2), blobs(), name, epochs=8, rank=0, progress=False).posterior
    assert isinstance(diagonal, tb.Gaussian)
    with pytest.raises(ValueError, match="rank is 1"):
        tb.fit(nn.Linear(3, 2), blobs(), name, epochs=1, rank=1, progress=False)


@pytest.mark.parametrize("name", AVERAGING)
def test_constant_rate_and_the_runs_schedule(name: str) -> None:
    _, lrs, _ = run_method(name, 4, 2, lr=0.05, start=0.5, cycles=4, low=1.0)
    assert lrs == pytest.approx([0.05] * 8)


@pytest.mark.parametrize("name", ["swa", "swag"])
@pytest.mark.parametrize(
    ("options", "before", "averaging"),
    [
        ({}, 0.001, 0.003),
        ({"swa_lr": 0.01}, 0.001, 0.01),
        ({"lr": 0.05}, 0.05, 0.05),
        ({"lr": 0.05, "swa_lr": 0.02}, 0.05, 0.02),
    ],
)
def test_averaging_is_faster_than_the_descent_unless_a_rate_is_given(
    name: str, options: dict[str, float], before: float, averaging: float
) -> None:
    method, lrs, _ = run_method(name, 8, 10, **options)
    assert lrs == pytest.approx([before] * 60 + [averaging] * 20)  # the last quarter
    assert len(method.averager) == 20


@pytest.mark.parametrize("name", AVERAGING)
def test_batch_norm_is_recalibrated_at_the_end(name: str) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))

    run = tb.fit(net, blobs(), name, epochs=4, batch_size=60, progress=False)
    mean = run.posterior.mean()
    hidden = nn.functional.linear(blobs()[0], mean["0.weight"], mean["0.bias"]).double()
    np.testing.assert_allclose(mean["1.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mean["1.running_var"], hidden.var(0), rtol=1e-4)
    assert mean["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 1.0}, "start is 1: expected the share"),
        ({"cycles": 0}, "cycles is 0"),
        ({"low": 2.0}, "low is 2"),
        ({"swa_lr": 0.0}, "swa_lr is 0"),
    ],
)
def test_methods_refuse(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tb.fit(nn.Linear(3, 2), blobs(), name, epochs=1, progress=False, **options)
