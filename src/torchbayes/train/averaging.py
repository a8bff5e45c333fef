"""What the averaging methods share: train as usual, then go on in cycles and average their ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.average.averager import Averager
from torchbayes.average.freeze import freeze
from torchbayes.posterior import Posterior
from torchbayes.train.method import Method, Plan
from torchbayes.train.schedule import Schedule

__all__ = ["AveragingMethod"]

_NORM_BATCHES = 20


class AveragingMethod(Method):
    """A method that takes a snapshot at the end of every learning-rate cycle of its last epochs.

    The first epochs follow the run's own schedule, squeezed into their number. A subclass calls
    `average_from` before `set_optimizer` and sets `averager`.
    """

    averager: Averager[Posterior]

    def average_from(
        self, plan: Plan, start: float, cycles: int, low: float, swa_lr: float | None
    ) -> None:
        """Say when averaging begins and in which cycles it goes on."""
        if not 0 <= start < 1:
            raise ValueError(
                f"start is {start:g}: expected the share of the epochs before averaging, from 0 to below 1"
            )
        if swa_lr is not None and not swa_lr > 0:
            raise ValueError(f"swa_lr is {swa_lr:g}: expected a learning rate above 0")
        self.swa_lr = swa_lr
        self.cyclic = Schedule("cyclic", cycles=cycles, low=low)
        self.first_epoch = min(round(start * plan.epochs), plan.epochs - 1)
        left = plan.epochs - self.first_epoch
        self.cycle_ends = set(self.cyclic.cycle_ends(left, plan.steps_per_epoch))
        self.averaging, self.averaging_updates = False, 0

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use `optimizer`, on the plan's schedule until averaging begins."""
        self.optimizer = optimizer
        self.scheduler = self.plan.schedule.build(
            optimizer, self.first_epoch, self.plan.steps_per_epoch
        )

    def _begin_averaging(self) -> None:
        self.averaging = True
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] if self.swa_lr is None else self.swa_lr
            group["initial_lr"] = group["lr"]  # what the new scheduler takes for its base
        left = self.plan.epochs - self.first_epoch
        self.scheduler = self.cyclic.build(self.optimizer, left, self.plan.steps_per_epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Change to the cyclical learning rate when it is time."""
        super().begin_epoch(epoch)
        if epoch >= self.first_epoch and not self.averaging:
            self._begin_averaging()

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """One update, and a snapshot if it ends a cycle."""
        try:
            return super().step(closure)
        finally:
            # Counts an update that was left out because float16 overflowed, too: every cycle has to end.
            if self.averaging:
                self.averaging_updates += 1
                if self.averaging_updates in self.cycle_ends:
                    self.averager.update()

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Give the average batch-norm statistics of its own at the end of the run."""
        super().end_epoch(epoch, batches)
        if epoch + 1 == self.epochs:
            self.averager.recalibrate(batches)

    def scored(self, batches: Iterable[Any]) -> nn.Module:
        """The averaged network, once there is one."""
        if len(self.averager) == 0:
            return super().scored(batches)
        # Some batches are enough for batch norm here; at the end of the run it gets all of them.
        some = itertools.islice(batches, _NORM_BATCHES)
        return freeze(self.model, self.averager.mean(), some)

    def posterior(self) -> Posterior:
        """The average's; there is one once the first cycle has ended."""
        return self.averager.posterior()

    def state_dict(self) -> dict[str, Any]:
        """The state of the training and of the average."""
        return super().state_dict() | {
            "averaging": self.averaging,
            "averaging_updates": self.averaging_updates,
            "averager": self.averager.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        if state["averaging"]:
            self._begin_averaging()  # the scheduler's state is that of the cyclical one
        super().load_state_dict(state)
        self.averaging_updates = state["averaging_updates"]
        self.averager.load_state_dict(state["averager"])
