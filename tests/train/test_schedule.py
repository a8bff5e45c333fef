"""Learning rates against their closed forms, update by update."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import torchbayes as tb

EPOCHS, STEPS = 6, 5
TOTAL = EPOCHS * STEPS


def rates(schedule: tb.Schedule, lr: float = 0.4) -> list[float]:
    """The rate of every update of a run, in two groups at once."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr},
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr / 2},
    ]
    optimizer = torch.optim.SGD(groups, lr=lr)
    scheduler = schedule.build(optimizer, EPOCHS, STEPS)
    seen = []
    for _ in range(TOTAL):
        seen.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[1]["lr"] == pytest.approx(seen[-1] / 2, abs=1e-12)
        optimizer.step()
        scheduler.step()
    return seen


def closed_form(schedule: tb.Schedule, step: int) -> float:
    """The factor of the rate at an update, counted from 0."""
    warmup = round(schedule.warmup_epochs * STEPS)
    if step < warmup:
        return 0.01 + 0.99 * step / warmup
    progress = (step - warmup) / (TOTAL - warmup)
    if schedule.name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.name == "linear":
        return 1 - progress
    if schedule.name == "step":
        return schedule.gamma ** sum(step >= m * STEPS for m in schedule.milestones)
    if schedule.name == "polynomial":
        return float((1 + (step - warmup) / STEPS / schedule.offset) ** -schedule.power)
    return 1.0


@pytest.mark.parametrize("warmup", [0, 1, 2.5, 0.01])
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "constant"},
        {"name": "cosine"},
        {"name": "linear"},
        {"name": "polynomial"},
        {"name": "polynomial", "power": 1.0, "offset": 0.5},
        {"name": "step", "milestones": (3, 5)},
        {"name": "step", "milestones": (1, 2, 4), "gamma": 0.5},
    ],
)
def test_rates_are_the_closed_forms(settings: dict[str, Any], warmup: float) -> None:
    schedule = tb.Schedule(**settings, warmup_epochs=warmup)
    truth = [0.4 * closed_form(schedule, step) for step in range(TOTAL)]
    assert rates(schedule) == pytest.approx(truth, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize(("cycles", "low"), [(1, 0.0), (3, 0.0), (4, 0.1), (2, 1.0)])
def test_cycles_are_cosines_that_start_anew(cycles: int, low: float, warmup: int) -> None:
    schedule = tb.Schedule("cyclic", cycles=cycles, low=low, warmup_epochs=warmup)
    ends = schedule.cycle_ends(EPOCHS, STEPS)
    begin = warmup * STEPS
    assert len(ends) == cycles
    assert ends[-1] == TOTAL
    lengths = [b - a for a, b in zip((begin, *ends), ends, strict=False)]
    assert max(lengths) - min(lengths) <= 1
    truth = [0.01 + 0.99 * step / begin for step in range(begin)]
    for length in lengths:
        cosine = [0.5 * (1 + math.cos(math.pi * step / length)) for step in range(length)]
        truth += [low + (1 - low) * value for value in cosine]
    assert rates(schedule, lr=1.0) == pytest.approx(truth, rel=1e-6, abs=1e-9)
    assert tb.Schedule("cosine").cycle_ends(EPOCHS, STEPS) == ()


def test_more_cycles_than_updates() -> None:
    assert tb.Schedule("cyclic", cycles=9).cycle_ends(1, 3) == (1, 2, 3)


@pytest.mark.parametrize(
    "schedule",
    [
        tb.Schedule("cosine", warmup_epochs=2),
        tb.Schedule("step", milestones=(1, 3), warmup_epochs=2),
        tb.Schedule("cyclic", cycles=3, warmup_epochs=1),
        tb.Schedule("linear"),
    ],
    ids=lambda schedule: schedule.name,
)
@pytest.mark.parametrize("stop", [3, 10, 17])
def test_a_resumed_schedule_goes_on_bit_for_bit(schedule: tb.Schedule, stop: int) -> None:
    def start() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
        return optimizer, schedule.build(optimizer, EPOCHS, STEPS)

    whole = rates(schedule)
    optimizer, scheduler = start()
    for _ in range(stop):
        optimizer.step()
        scheduler.step()
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer, scheduler = start()
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    rest = []
    for _ in range(stop, TOTAL):
        rest.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rest == whole[stop:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "exponential"},
            "'exponential': expected constant, cosine, linear, step, cyclic or",
        ),
        ({"name": "step"}, "needs milestones"),
        ({"warmup_epochs": -1}, "warmup_epochs is -1"),
        ({"warmup_epochs": math.nan}, "warmup_epochs is nan"),
        ({"name": "cyclic", "cycles": 0}, "cycles is 0"),
        ({"name": "cyclic", "low": 1.5}, "low is 1.5"),
        ({"name": "cyclic", "low": -0.1}, "low is -0.1"),
        ({"name": "polynomial", "power": 0.0}, "power is 0"),
        ({"name": "polynomial", "offset": math.inf}, "offset is inf"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tb.Schedule(**settings)
