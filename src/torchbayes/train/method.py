"""What `fit` needs to know of a method, and the list of all methods."""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from torchbayes.core.batch import call
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Posterior
from torchbayes.train.schedule import Schedule

__all__ = ["METHODS", "Method", "Option", "Plan", "find_method", "method_options", "register"]


@dataclass
class Plan:
    """What a method is told about the run it is part of.

    Attributes:
        train_size: The number of training examples.
        epochs: The epochs asked for.
        steps_per_epoch: The updates in an epoch.
        generator: The source of the method's own randomness; saved with the run.
        new_model: Makes another network of the same kind with fresh random weights.
        schedule: How the learning rate changes.
        rank: This process's number under torchrun, from 0.
        world_size: The number of processes.
    """

    train_size: int
    epochs: int
    steps_per_epoch: int
    generator: torch.Generator
    new_model: Callable[[], nn.Module]
    schedule: Schedule = field(default_factory=Schedule)
    rank: int = 0
    world_size: int = 1


class Method(ABC):
    """A way to train a network into a posterior, driven by `fit`.

    A subclass's constructor sets `module` and `optimizer` and takes its options as keyword arguments
    with defaults; they become the method's options in `fit`, in recipes and on the command line.

    Attributes:
        name: What users call it.
        summary: One line on what it does.
        paper: Where it is from.
        family: What stands for the posterior: `"one network"`, `"ensemble, masks, generator"`,
            `"a Gaussian"` or `"a chain's samples"`.
        posterior_kind: The class name of its posterior.
        one_per_rank: Under torchrun, every process trains members of its own on all of the data instead
            of sharing each batch.
        reduces_gradients: Under torchrun, `fit` averages the gradients over processes. A method that
            needs other statistics than their mean sets this to False and reduces them in its step.
        module: What is called in training: the network itself, or a wrapper around it.
        optimizer: A torch optimiser over the module's parameters.
        scheduler: Its learning-rate schedule.
        logs: Numbers of the last loss to be averaged over the epoch in the run's history.
        traces: What a chain looked like now and then, for `torchbayes diagnose`; kept in the run folder.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[str]
    posterior_kind: ClassVar[str]
    one_per_rank: ClassVar[bool] = False
    reduces_gradients: ClassVar[bool] = True

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler

    def __init__(self, model: nn.Module, likelihood: Likelihood, plan: Plan) -> None:
        self.model, self.likelihood, self.plan = model, likelihood, plan
        self.module = model
        self.logs: dict[str, Tensor] = {}
        self.traces: list[dict[str, Any]] = []

    @property
    def epochs(self) -> int:
        """The epochs that the loop has to run for `plan.epochs` of training."""
        return self.plan.epochs

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use `optimizer`, on the plan's schedule."""
        self.optimizer = optimizer
        self.scheduler = self.plan.schedule.build(
            optimizer, self.plan.epochs, self.plan.steps_per_epoch
        )

    def penalty(self) -> Tensor | None:
        """What is added to the mean negative log-likelihood, if anything, such as KL / train_size."""
        return None

    def loss(self, inputs: Any, targets: Tensor) -> Tensor:
        """The mean loss of a batch; also notes its parts in `logs`."""
        nll = self.likelihood.loss(call(self.module, inputs), targets)
        self.logs = {"nll": nll.detach()}
        penalty = self.penalty()
        if penalty is None:
            return nll
        self.logs["penalty"] = penalty.detach()
        return nll + penalty

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """One update; `closure` clears the gradients, computes the loss and its gradients."""
        loss = self.optimizer.step(closure)  # type: ignore[arg-type]
        self.scheduler.step()
        assert loss is not None
        return loss  # type: ignore[return-value]

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027
        """Called before every epoch, also before one that is resumed half way."""

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:  # noqa: B027
        """Called after every epoch; `batches` goes through the training data if it is asked to."""

    def scored(self, batches: Iterable[Any]) -> nn.Module:
        """The network whose outputs are scored on validation data after an epoch, in evaluation mode.

        Args:
            batches: Goes through the training data if it is asked to.
        """
        return self.module.eval()

    @abstractmethod
    def posterior(self) -> Posterior:
        """What has been learned, as a posterior of `model`."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: tensors, numbers, strings, lists and dictionaries of them."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


METHODS: dict[str, type[Method]] = {}

_M = TypeVar("_M", bound=type[Method])


def register(cls: _M) -> _M:
    """Add a method to the registry under its `name`, and so to `fit`, command line, docs and tests."""
    if cls.name in METHODS:
        raise ValueError(f"there is a method {cls.name!r} already: choose another name")
    METHODS[cls.name] = cls
    return cls


def find_method(name: str) -> type[Method]:
    """The method called `name`.

    Raises:
        ValueError: If there is none; the message suggests the nearest name.
    """
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(METHODS)}"
    raise ValueError(f"there is no method {name!r}: {hint}")


@dataclass(frozen=True)
class Option:
    """One option of a method: its name, type and default."""

    name: str
    type: Any
    default: Any


def method_options(method: type[Method]) -> dict[str, Option]:
    """The options of a method: the keyword arguments of its constructor."""
    hints = get_type_hints(method.__init__)
    return {
        name: Option(name, hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(method.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def check_options(method: type[Method], options: Iterable[str]) -> None:
    """Raise a `ValueError` that names the first option that `method` does not have."""
    known = method_options(method)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"method {method.name!r} has no option {name!r}: {hint}")
