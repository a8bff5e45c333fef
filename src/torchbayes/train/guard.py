"""Notice a training that breaks down although every number is finite, and keep a state to go back to.

A step that is too long shows in the loss long before anything overflows. `Guard` compares each loss with the
first one, `Kept` holds the last state that was still good, and `doubt` holds the finished posterior against
the loss that the network began with.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.predict.results import Predictive, RegressionPredictive

__all__ = ["CHECKED", "RETRIES", "SLOWER", "Guard", "Kept", "doubt", "largest_weight"]

RETRIES = 3
"""How often a run may go back."""

SLOWER = 0.3
"""The factor of the learning rate when it does."""

# The median of so many losses must stay within this multiple of what they were at first.
_WINDOW, _TIMES = 20, 10.0
CHECKED = 32
"""Training examples that a posterior is checked on."""
# States above this are not copied: the copy would be what does not fit into memory.
_BYTES = 2**28
# After fewer updates than this, no method is expected to have learned anything.
_SHORT = 100
# What a result may be worse than the untrained network, as a share of its loss.
_WORSE = 0.25


@dataclass
class Guard:
    """The first loss of a run and the last ones.

    Attributes:
        start: The loss of the first batch before any update; None until there is one.
        recent: The last losses.
        tries: How often the run has gone back.
        updates: How many updates there were.
    """

    start: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    tries: int = 0
    updates: int = 0

    def _above(self, times: float) -> bool:
        """Whether the last losses have grown by more than a multiple of the first."""
        if self.start is None or len(self.recent) < _WINDOW // 4:
            return False
        return median(self.recent) > self.start + times * max(1.0, abs(self.start))

    def add(self, loss: float) -> bool:
        """Note the loss of an update; return whether training has broken down."""
        if not math.isfinite(loss):
            return False  # a chain that has ended, or an update that was skipped
        if self.start is None:
            self.start = loss
        self.recent.append(loss)
        self.updates += 1
        return self._above(_TIMES)

    @property
    def good(self) -> bool:
        """Whether the last losses are no reason for doubt."""
        return not self._above(1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "start": self.start, "recent": list(self.recent), "tries": self.tries,
            "updates": self.updates,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.start, self.tries, self.updates = state["start"], state["tries"], state["updates"]
        self.recent = deque(state["recent"], maxlen=_WINDOW)


@dataclass
class Kept:
    """A state of a run that was good, with its place in the run.

    Args:
        state: What to go back to; its tensors are copied.
        epoch: The epoch that begins there.
        tries: How often the run had gone back before.
    """

    state: dict[str, Any]
    epoch: int
    tries: int

    def __post_init__(self) -> None:
        self.state = copied(self.state)

    @staticmethod
    def wanted(epoch: int) -> bool:
        """Whether to keep the state at the beginning of an epoch: the first ones, then ever fewer."""
        return epoch & (epoch - 1) == 0

    @staticmethod
    def small(module: nn.Module) -> bool:
        """Whether a network is small enough to keep a copy of its training."""
        return sum(p.numel() * p.element_size() for p in module.parameters()) * 4 <= _BYTES


def copied(state: Any) -> Any:
    """Return a state with tensors of its own, except for samples, which never change."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {
            k: list(v) if k in ("samples", "traces", "members") else copied(v)
            for k, v in state.items()
        }
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def largest_weight(module: nn.Module) -> str:
    """Return the name of the parameter with the largest entries: where a breakdown shows most."""
    sizes = {n: float(p.detach().abs().mean()) for n, p in module.named_parameters() if p.numel()}
    return max(sizes, key=lambda name: sizes[name]) if sizes else "the network"


@torch.no_grad()
def doubt(predictive: Predictive, targets: Tensor, guard: Guard, posterior: Any) -> str | None:
    """Say what is wrong with a posterior's predictions of some training examples, if anything is.

    Args:
        predictive: The predictions.
        targets: What was observed.
        guard: The first loss of the run and its last ones; after a few updates nothing is expected yet.
        posterior: The posterior.
    """
    nll = -float(predictive.log_prob(targets).double().sum()) / len(targets)
    if not math.isfinite(nll):
        return "its predictions of the training data are not finite"
    if isinstance(predictive, RegressionPredictive) and _infinitely_wide(predictive):
        return "the widths of its predictions are infinite"
    start = guard.start
    if start is None or guard.updates < _SHORT:
        return None
    if nll > start + _WORSE * max(1.0, abs(start)):
        return (
            f"its predictions of the training data (NLL {nll:.3g}) are worse than those of the network "
            f"before training ({start:.3g})"
        )
    # Of a Gaussian; snapshots may be one, and a hypernetwork may generate what is not used.
    if hasattr(posterior, "std") and float(predictive.epistemic.abs().max()) == 0.0:
        return "its draws do not differ: its width has collapsed"
    return None


def _infinitely_wide(predictive: RegressionPredictive) -> bool:
    if bool(predictive.std.isfinite().all()):
        return False
    # Heavy tails may have no variance; quartiles they have.
    return not bool((predictive.quantile(0.75) - predictive.quantile(0.25)).isfinite().all())
