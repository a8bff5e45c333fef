"""Learning-rate schedules by name, made of torch's own schedulers and stepped once per update."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs

__all__ = ["Schedule", "as_schedule"]


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule of a run.

    Args:
        name: `constant`, `cosine` (to 0), `linear` (to 0), `step`, `cyclic` (cosines with restarts) or
            `polynomial` (Langevin dynamics' slow decay).
        milestones: For `step`: epochs after which the rate is multiplied by `gamma`.
        gamma: For `step`: that factor.
        warmup_epochs: Epochs of a linear rise from 1 % of the rate at the start.
        cycles: For `cyclic`: number of equally long cycles; `cycle_ends` says where they end.
        low: For `cyclic`: what a cycle ends at, as a fraction of the rate; 1 keeps the rate constant.
        power: For `polynomial`: γ in the factor (1 + t/b)^−γ; a sampler's steps need 0.5 < γ ≤ 1.
        offset: For `polynomial`: b, in epochs.

    Example:
        >>> import torch, torchbayes as tb
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = tb.Schedule("step", milestones=(1,)).build(optimizer, epochs=2, steps_per_epoch=3)
        >>> for _ in range(3):
        ...     optimizer.step(); scheduler.step()
        >>> scheduler.get_last_lr()
        [0.1]
    """

    name: str = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup_epochs: float = 0.0
    cycles: int = 1
    low: float = 0.0
    power: float = 0.55
    offset: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in ("constant", "cosine", "linear", "step", "cyclic", "polynomial"):
            raise ValueError(
                f"schedule is {self.name!r}: expected constant, cosine, linear, step, cyclic or polynomial"
            )
        for name, value in (("power", self.power), ("offset", self.offset)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value:g}: expected a number above 0")
        if self.name == "step" and not self.milestones:
            raise ValueError("a step schedule needs milestones: the epochs at which the rate drops")
        if not 0 <= self.warmup_epochs < math.inf:
            raise ValueError(
                f"warmup_epochs is {self.warmup_epochs:g}: expected a number of epochs from 0"
            )
        if self.cycles < 1:
            raise ValueError(f"cycles is {self.cycles}: expected at least 1 learning-rate cycle")
        if not 0 <= self.low <= 1:
            raise ValueError(
                f"low is {self.low:g}: expected the share of the rate left at a cycle's end, from 0 to 1"
            )

    def settings(self) -> dict[str, Any]:
        """Return the arguments under the names of a run's settings, where `name` is `schedule`."""
        arguments = dataclasses.asdict(self)
        return {"schedule": arguments.pop("name"), **arguments}

    def cycle_ends(self, epochs: int, steps_per_epoch: int) -> tuple[int, ...]:
        """Return the updates after which a cycle of a `cyclic` schedule ends; nothing for other schedules.

        The last one is the last update of the run. With fewer updates than cycles, every update ends one.

        Example:
            >>> import torchbayes as tb
            >>> tb.Schedule("cyclic", cycles=3).cycle_ends(epochs=2, steps_per_epoch=5)
            (4, 7, 10)
        """
        if self.name != "cyclic":
            return ()
        total = max(1, epochs * steps_per_epoch)
        warmup = min(round(self.warmup_epochs * steps_per_epoch), total - 1)
        return tuple(warmup + end for end in _cycle_ends(total - warmup, self.cycles))

    def build(self, optimizer: Optimizer, epochs: int, steps_per_epoch: int) -> lrs.LRScheduler:
        """Return the torch scheduler of this schedule for an optimiser."""
        total = max(1, epochs * steps_per_epoch)
        warmup = round(self.warmup_epochs * steps_per_epoch)
        rest = max(1, total - warmup)
        ends = _cycle_ends(rest, self.cycles)
        make: dict[str, Callable[[], lrs.LRScheduler]] = {
            "constant": lambda: lrs.ConstantLR(optimizer, factor=1.0),
            "cosine": lambda: lrs.CosineAnnealingLR(optimizer, T_max=rest),
            "linear": lambda: lrs.LinearLR(optimizer, 1.0, 0.0, total_iters=rest),
            "step": lambda: lrs.MultiStepLR(
                optimizer,
                [max(0, m * steps_per_epoch - warmup) for m in self.milestones],
                self.gamma,
            ),
            # CosineAnnealingWarmRestarts has whole cycles of one length only and an absolute minimum.
            "cyclic": lambda: lrs.LambdaLR(optimizer, lambda step: _cyclic(step, ends, self.low)),
            "polynomial": lambda: lrs.LambdaLR(
                optimizer, lambda step: (1 + step / (self.offset * steps_per_epoch)) ** -self.power
            ),
        }
        if warmup == 0:
            return make[self.name]()
        rise = lrs.LinearLR(optimizer, start_factor=0.01, total_iters=warmup)
        return lrs.SequentialLR(optimizer, [rise, make[self.name]()], milestones=[warmup])


def as_schedule(value: str | Schedule) -> Schedule:
    """Return the schedule that a `schedule` argument denotes: a `Schedule` or its name."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, str):
        return Schedule(value)
    given = value if isinstance(value, type) else type(value)
    raise TypeError(
        f"schedule is a {given.__name__}, but fit makes the optimiser itself and its scheduler too: pass a "
        'name such as "cosine", or torchbayes.Schedule("cosine", warmup_epochs=1)'
    )


def _cycle_ends(steps: int, cycles: int) -> list[int]:
    """Split `steps` updates into `cycles` parts that differ by at most one update."""
    return sorted({-(-steps * cycle // cycles) for cycle in range(1, cycles + 1)})


def _cyclic(step: int, ends: Sequence[int], low: float) -> float:
    """Return the factor of the learning rate before update `step`: half a cosine per cycle."""
    cycle = bisect_right(ends, step)
    if cycle == len(ends):
        return low
    begin = ends[cycle - 1] if cycle else 0
    progress = (step - begin) / (ends[cycle] - begin)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
