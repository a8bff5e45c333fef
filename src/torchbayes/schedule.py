"""Learning-rate schedules by name, made of torch's own schedulers and stepped once per update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes over a run.

    Args:
        name: `constant`, `cosine` (to 0), `linear` (to 0) or `step`.
        milestones: For `step`: the epochs after which the rate is multiplied by `gamma`.
        gamma: For `step`: the factor.
        warmup_epochs: The epochs of a linear rise from 1 % of the rate at the start.

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

    def __post_init__(self) -> None:
        if self.name not in ("constant", "cosine", "linear", "step"):
            raise ValueError(
                f"schedule is {self.name!r}: expected constant, cosine, linear or step"
            )
        if self.name == "step" and not self.milestones:
            raise ValueError("a step schedule needs milestones: the epochs at which the rate drops")

    def build(self, optimizer: Optimizer, epochs: int, steps_per_epoch: int) -> lrs.LRScheduler:
        """The torch scheduler of this schedule for one optimiser."""
        total = max(1, epochs * steps_per_epoch)
        warmup = round(self.warmup_epochs * steps_per_epoch)
        rest = max(1, total - warmup)
        make: dict[str, Callable[[], lrs.LRScheduler]] = {
            "constant": lambda: lrs.ConstantLR(optimizer, factor=1.0),
            "cosine": lambda: lrs.CosineAnnealingLR(optimizer, T_max=rest),
            "linear": lambda: lrs.LinearLR(optimizer, 1.0, 0.0, total_iters=rest),
            "step": lambda: lrs.MultiStepLR(
                optimizer,
                [max(1, m * steps_per_epoch - warmup) for m in self.milestones],
                self.gamma,
            ),
        }
        if warmup == 0:
            return make[self.name]()
        rise = lrs.LinearLR(optimizer, start_factor=0.01, total_iters=warmup)
        return lrs.SequentialLR(optimizer, [rise, make[self.name]()], milestones=[warmup])
