"""Averaging methods: train as usual, then continue in learning-rate cycles and average their ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.average.averager import Averager
from torchbayes.average.freeze import freeze
from torchbayes.likelihood import Likelihood
from torchbayes.optim import MAP, MLE
from torchbayes.posterior import Posterior
from torchbayes.train.failures import SkippedStep
from torchbayes.train.method import Method, Plan
from torchbayes.train.schedule import Schedule
from torchbayes.train.wrapper import MeanFieldMethod
from torchbayes.variational import MeanField

__all__ = ["AveragingMethod", "HwaMethod", "SwaMethod"]

_NORM_BATCHES = 20
_FASTER = 3.0  # the rate of averaging in units of the one before, if none is given


class AveragingMethod(Method):
    """Trains as another method does, and takes a snapshot at the end of every cycle of the last epochs.

    The first epochs follow the run's own schedule, squeezed into their number.

    Args:
        start: Share of the epochs before averaging begins.
        cycles: Learning-rate cycles while averaging, each ending in a snapshot; for one snapshot per
            epoch give the number of epochs that are left.
        low: Learning rate at the end of a cycle, as a fraction of it; 1 keeps it constant.
        swa_lr: Learning rate while averaging, which decides how wide a Gaussian becomes; `lr` if None.
    """

    averager: Averager[Posterior]

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        start: float = 0.5,
        cycles: int = 20,
        low: float = 1.0,
        swa_lr: float | None = None,
        **options: Any,
    ) -> None:
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
        self.averaging_factor = 1.0  # times the rate before, unless `swa_lr` is given
        super().__init__(model, likelihood, plan, **options)

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use `optimizer`, on the plan's schedule until averaging begins."""
        self.optimizer = optimizer
        self.scheduler = self.plan.schedule.build(
            optimizer, self.first_epoch, self.plan.steps_per_epoch
        )

    def _begin_averaging(self) -> None:
        self.averaging = True
        for group in self.optimizer.param_groups:
            usual = group["initial_lr"] * self.averaging_factor
            group["lr"] = usual if self.swa_lr is None else self.swa_lr
            group["initial_lr"] = group["lr"]  # the base of the new scheduler
        left = self.plan.epochs - self.first_epoch
        self.scheduler = self.cyclic.build(self.optimizer, left, self.plan.steps_per_epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Switch to the cyclical learning rate when averaging begins."""
        super().begin_epoch(epoch)
        if epoch >= self.first_epoch and not self.averaging:
            self._begin_averaging()

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """Take one step, and a snapshot if it ends a cycle."""
        try:
            loss = super().step(closure)
        except SkippedStep:  # it counts too: every cycle has to end
            self._count()
            raise
        self._count()
        return loss

    def _count(self) -> None:
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
        """Return the averaged network, once there is one."""
        if len(self.averager) == 0:
            return super().scored(batches)
        # Some batches are enough for batch norm here; at the end of the run it gets all of them.
        some = itertools.islice(batches, _NORM_BATCHES)
        return freeze(self.model, self.averager.mean(), some)

    def posterior(self) -> Posterior:
        """Return the average's posterior, which exists once the first cycle has ended."""
        return self.averager.posterior()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training and of the average."""
        return super().state_dict() | {
            "averaging": self.averaging,
            "averaging_updates": self.averaging_updates,
            "averager": self.averager.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        if state["averaging"]:
            self._begin_averaging()  # the scheduler's state is that of the cyclical one
        super().load_state_dict(state)
        self.averaging_updates = state["averaging_updates"]
        self.averager.load_state_dict(state["averager"])


class SwaMethod(AveragingMethod):
    """An average of the weights of ordinary training: SWA and SWAG.

    Without a `lr` the network descends as `map` does and averaging takes three times that rate: an average
    lags behind weights that are still on their way, and at the rate of the descent its Gaussian is nearly a
    point.

    Args:
        lr: Learning rate; if None 0.001, and while averaging 0.003 unless `swa_lr` is given.
    """

    uses = (MAP,)

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, *, lr: float | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, likelihood, plan, **options)
        if lr is None:
            self.averaging_factor = _FASTER
        self.set_optimizer(self.build(MAP, model, **({} if lr is None else {"lr": lr})))
        self.averager = self.build(self.algorithm, model)


class HwaMethod(AveragingMethod, MeanFieldMethod):
    """An average of the means and variances of a mean field."""

    uses = (MLE, MeanField)

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, **options: Any
    ) -> None:
        super().__init__(model, likelihood, plan, **options)
        self.averager = self.build(self.algorithm, self.module)
