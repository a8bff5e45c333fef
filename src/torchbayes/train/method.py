"""What `fit` drives: a method owns the weights while it trains, and ends in a posterior.

A subclass of `Method` says how one kind of algorithm is trained, such as all samplers. The registry makes a
method of every declared class from it (`torchbayes.train.registry`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from torchbayes.core.batch import call
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.data.order import EpochLoader
from torchbayes.likelihood import Likelihood
from torchbayes.optim.base import ModelOptimizer
from torchbayes.posterior import Posterior
from torchbayes.train.noise import LearnedNoise
from torchbayes.train.schedule import Schedule
from torchbayes.train.start import Start

__all__ = ["Method", "Plan", "arguments_of", "loss_of"]

_Made = TypeVar("_Made")

# What a constructor is told by `fit`, not by the user.
_FACTS = {
    "model", "likelihood", "plan", "train_size", "steps", "batch_size", "params", "generator", "output",
}  # fmt: skip


@dataclass
class Plan:
    """What a method is told about the run it is part of.

    Attributes:
        train_size: The number of training examples.
        epochs: The epochs asked for.
        steps_per_epoch: The updates in an epoch.
        batch_size: The examples in a batch, if they are known.
        peek: Returns the first batch; None if there is no data.
        joins: Whether batches of several epochs can be joined to a larger one, because the data is in memory
            and nothing is done with parts of a batch or with all gradients together.
        generator: The source of the method's own randomness; saved with the run.
        new_model: Makes another network of the same kind with fresh random weights, or from `start`.
        schedule: How the learning rate changes.
        rank: This process's number under torchrun, from 0.
        world_size: The number of processes.
        output: Where the likelihood's tensor is in what the network returns.
        start: The given weights that training starts from, if any; the model has them already.
    """

    train_size: int
    epochs: int
    steps_per_epoch: int
    generator: torch.Generator
    new_model: Callable[[], nn.Module]
    schedule: Schedule = field(default_factory=Schedule)
    rank: int = 0
    world_size: int = 1
    output: Output = None
    start: Start | None = None
    batch_size: int | None = None
    peek: Callable[[], Any] | None = None
    joins: bool = False


def arguments_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class that are options, that is all but facts such as the model."""
    parameters = list(inspect.signature(cls).parameters.values())
    first = 0 if issubclass(cls, Method) else 1  # what an algorithm is made of, such as the model
    return {
        p.name: p
        for p in parameters[first:]
        if p.name not in _FACTS and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def loss_of(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> Tensor:
    """Return the mean over all of a batch's examples, also those that the likelihood does not count.

    `fit` counts every example in `train_size`, and so do optimisers that square the gradients of single
    examples: one without a label is an example that says nothing.
    """
    given = () if weights is None else (weights,)
    loss = likelihood.loss(outputs, targets, *given)
    counted = likelihood.count(targets)
    return loss if counted == len(targets) else loss * (counted / len(targets))


class Method(ABC):
    """A way to train a network into a posterior, driven by `fit`.

    A subclass's constructor sets `module` and `optimizer`. The options that a user may give are its
    keyword-only arguments and the arguments of `algorithm` and of the classes in `uses`; what the
    constructor does not take itself it hands on to this one, and `build` uses it.

    Attributes:
        name: What users call it.
        summary: One line on what it does.
        paper: Where it is from.
        family: What stands for the posterior, such as `"a Gaussian"`.
        posterior_kind: The class name of its posterior.
        target: What `verify` holds it against, if anything.
        algorithm: The class that it trains with.
        uses: Other classes that it makes with `build`.
        defaults: Defaults of its own in place of those of the classes.
        starts_apart: Whether it trains members that must not start from the same weights.
        one_per_rank: Under torchrun, every process trains members of its own on all of the data instead
            of sharing each batch.
        independent_batches: Whether `fit` draws every batch from all the data instead of going through them
            in a random order.
        module: What is called in training: the network itself, or a wrapper around it.
        optimizer: A torch optimiser over the module's parameters.
        scheduler: Its learning-rate schedule.
        noise: The likelihood's own parameters; a method that trains several networks restarts it for each
            and keeps what each ends with.
        logs: Numbers of the last loss to be averaged over the epoch in the run's history; `worst` is not, by
            which a breakdown is noticed among several networks.
        noted: Numbers for the history's row of the epoch that has ended.
        chosen: Options that it has chosen by a trial; a resumed run is given them.
        dead: Whether what is trained now has broken down and is left out, because there is more to train.
        traces: What a chain looked like now and then, for `torchbayes diagnose`; kept in the run folder.

    Args:
        model: The network.
        likelihood: What its outputs mean.
        plan: Facts about the run.
        **options: Options for `build`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[str]
    posterior_kind: ClassVar[str]
    target: ClassVar[str | None]
    algorithm: ClassVar[type]
    uses: ClassVar[tuple[type, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}
    one_per_rank: ClassVar[bool] = False
    starts_apart: ClassVar[bool] = False
    independent_batches: ClassVar[bool] = False

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, **options: Any
    ) -> None:
        self.model, self.likelihood, self.plan, self.options = model, likelihood, plan, options
        self.module = model
        self.noise = LearnedNoise(likelihood)
        self.logs: dict[str, Tensor] = {}
        self.noted: dict[str, float] = {}
        self.chosen: dict[str, Any] = {}
        self.dead = False
        self.traces: list[dict[str, Any]] = []

    def build(self, cls: type[_Made], first: Any, **others: Any) -> _Made:
        """Make an object with those of the method's options, and facts of the run, that it takes.

        Args:
            cls: What to make.
            first: What it is made of, such as the network.
            **others: More arguments, which count before options and facts.
        """
        make: Callable[..., _Made] = cls
        known = inspect.signature(make).parameters
        facts = {
            "train_size": self.plan.train_size,
            "steps": max(1, self.plan.epochs * self.plan.steps_per_epoch),
            "batch_size": self.plan.batch_size,
            "generator": self.plan.generator,
        }
        given = {**facts, **self.options, **others}
        return make(first, **{name: value for name, value in given.items() if name in known})

    @property
    def reduces_gradients(self) -> bool:
        """Whether `fit` averages the gradients over processes.

        An optimiser that needs other statistics than their mean reduces them in its step.
        """
        return not getattr(self.optimizer, "reduces_statistics", False)

    @property
    def epochs(self) -> int:
        """The epochs that the loop has to run for `plan.epochs` of training."""
        return self.plan.epochs

    @property
    def moving(self) -> nn.Module:
        """What holds the weights that the optimiser moves."""
        return self.module

    def suspect(self) -> nn.Module:
        """Return the network whose last loss was not finite."""
        return self.module

    def batches(self, loader: EpochLoader, epoch: int, start: int) -> Iterator[Any]:
        """Go through the batches of one of the loop's epochs.

        Args:
            loader: The training data.
            epoch: The epoch's number, from 0.
            start: Batches to leave out at its beginning.
        """
        return loader.batches(epoch, start)

    @property
    def own_folder(self) -> Path | None:
        """The folder that the method itself writes to in training; `fit` keeps other runs out of it."""
        return None

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use `optimizer`, on the plan's schedule."""
        self.optimizer = optimizer
        self.scheduler = self.plan.schedule.build(
            optimizer, self.plan.epochs, self.plan.steps_per_epoch
        )

    def outputs(self, inputs: Any) -> Tensor:
        """Return what the likelihood takes of the module's outputs."""
        returned = call(self.module, inputs)
        if self.plan.output is None and isinstance(returned, Tensor):
            return returned  # at every step, so without another call
        return output_tensor(returned, self.plan.output)

    def loss(self, inputs: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch, and note its parts in `logs`."""
        nll = loss_of(self.likelihood, self.outputs(inputs), targets, weights)
        self.logs = {"nll": nll.detach()}
        return nll

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """Take one step; `closure` clears the gradients, computes the loss and its gradients."""
        loss = self.optimizer.step(closure)  # type: ignore[arg-type]
        self.scheduler.step()
        assert loss is not None
        return loss  # type: ignore[return-value]

    def look(self) -> None:
        """Look at what the last step has left to be looked at afterwards, such as its gradients.

        Raises:
            FloatingPointError: If it was not finite.
        """
        if isinstance(self.optimizer, ModelOptimizer):
            self.optimizer.look()

    def slow_down(self, factor: float) -> None:
        """Multiply the learning rate, now and in the schedule that is left."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
            if "initial_lr" in group:
                group["initial_lr"] *= factor
        for scheduler in (self.scheduler, *getattr(self.scheduler, "_schedulers", ())):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [base * factor for base in scheduler.base_lrs]

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027
        """Prepare for an epoch, also for one that is resumed half way."""

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:  # noqa: B027
        """Finish an epoch.

        Args:
            epoch: The epoch's number, from 0.
            batches: Goes through this process's share of the training data once, in pairs of inputs and
                targets, with the weights of the examples where they have some, if it is asked to.
        """

    def scored(self, batches: Iterable[Any]) -> nn.Module:
        """Return the network whose outputs are scored on validation data, in evaluation mode.

        Args:
            batches: Goes through the training data once, in pairs of inputs and targets, if it is asked to.
        """
        return self.module.eval()

    @abstractmethod
    def posterior(self) -> Posterior:
        """Return what has been learned, as a posterior of `model`."""

    def pooled(self, states: list[dict[str, Any]]) -> Posterior:
        """Return what several processes have learned, for a method with `one_per_rank`.

        Args:
            states: Of each process that began the run, the state in which it has ended; {} if it had nothing
                to do.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs: tensors, numbers, strings, lists and dictionaries of them."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
