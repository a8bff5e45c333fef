"""Networks and loggers that fail when they are told to, and all that a failure must not change."""

from __future__ import annotations

import random
import signal
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbayes.train.progress import Progress


class Failed(Exception):
    """What was planned has failed."""


class Plan:
    """Fails at a place when it is passed for the n-th time.

    Args:
        where: Name of the place.
        at: Which time, from 1.
        error: What is raised.
    """

    def __init__(self, where: str = "", at: int = 1, error: type[BaseException] = Failed) -> None:
        self.where, self.at, self.error, self.count = where, at, error, 0

    def passes(self, where: str) -> None:
        if where == self.where:
            self.count += 1
            if self.count == self.at:
                raise self.error(where)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.plan.passes("backward")
        return gradient, None


class FailingNet(nn.Module):
    """Has batch norm, dropout and a frozen layer; some of its modules are in training mode."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(8, 3)
        self.eval()
        self.norm.train()
        self.plan = [plan]  # in a list, which copies share

    def __deepcopy__(self, memo: dict[int, Any]) -> FailingNet:
        twin = FailingNet(self.plan[0])
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        self.plan[0].passes("forward" if self.training else "evaluation")
        x = torch.relu(self.frozen(torch.relu(self.norm(self.first(x)))))
        return self.last(_Backward.apply(self.dropout(x), self.plan[0]))


class FailingLogger:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        self.plan.passes("logger")

    def artifact(self, path: Any) -> None: ...


class Watching(Progress):
    """Keeps the weights after the last step, and fails if planned."""

    def __init__(self, plan: Plan, network: nn.Module) -> None:
        self.plan, self.network = plan, network
        self.weights: dict[str, Tensor] = {}

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, *_: Any) -> None: ...

    def note(self, text: str) -> None: ...

    def advance(self, loss: float) -> None:
        self.weights = {n: p.detach().clone() for n, p in self.network.named_parameters()}
        self.plan.passes("progress")


def surroundings(network: nn.Module) -> dict[str, Any]:
    """Return everything besides values of weights that a failure must leave as it was."""
    hooks = [
        (name, key, len(value))
        for name, part in [*network.named_modules(), *network.named_parameters()]
        for key, value in [*vars(part).items(), ("hooks", getattr(part, "_backward_hooks", None))]
        if "hook" in key and hasattr(value, "__len__") and len(value)
    ]
    return {
        "modes": [module.training for module in network.modules()],
        "requires_grad": [(n, p.requires_grad, type(p)) for n, p in network.named_parameters()],
        "objects": [id(p) for p in network.parameters()],
        "hooks": hooks,
        "attributes": [sorted(vars(module)) for module in network.modules()],
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
        "gradients": torch.is_grad_enabled(),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "dtype": torch.get_default_dtype(),
    }  # fmt: skip
