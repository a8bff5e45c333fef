"""The base of every optimiser here: built from a model, with its own random generator, saved with both."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core import distributed
from torchbayes.core.averaging import AveragingGuard
from torchbayes.core.names import named_parameters, unwrapped
from torchbayes.core.parameters import Params, check_types, parameter_groups
from torchbayes.core.workspace import Workspace
from torchbayes.posterior.partial import held_names

__all__ = ["ModelOptimizer", "check_number", "check_train_size"]


def check_number(
    name: str, value: float, *, low: float = 0.0, above: bool = False, high: float = math.inf
) -> None:
    """Raise a `ValueError` unless low ≤ value ≤ high (low < value if `above`)."""
    if not (value > low if above else value >= low) or not value <= high or math.isnan(value):
        least = f"above {low:g}" if above else f"of at least {low:g}"
        most = "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueError(f"{name} is {value:g}: expected a number {least}{most}")


def check_train_size(size: Any) -> int:
    """Return `size` if it is a valid number of training examples; raise a `ValueError` otherwise."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"train_size is {size!r}: expected the number of training examples, at least 1"
        )
    return size


def _is_set(value: Any) -> bool:
    """Whether an option is a number, or several, worth showing: not a switch, and not without effect."""
    if isinstance(value, tuple):
        return all(map(_is_set, value))
    return type(value) in (int, float) and math.isfinite(value)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class ModelOptimizer(torch.optim.Optimizer, ABC):  # without ABC, torch ignores @abstractmethod
    """The base of the samplers and of the natural-gradient family.

    Learning-rate schedulers, parameter groups and checkpoints work as with torch's own optimisers. A class
    that lacks one of the abstract methods cannot be instantiated. Copies and pickles include the model:
    `copy.deepcopy((model, optimizer))` gives a pair that continues exactly as the original would.

    Args:
        model: The network.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.
        defaults: Default options of the groups, including `train_size`.
        generator: Source of the noise; a new one, seeded from torch's, if None. Its state is saved with the
            optimiser's.
    """

    takes_sparse_gradients = False

    def __init__(
        self, model: nn.Module, params: Params | None, defaults: dict[str, Any], *,
        generator: torch.Generator | None,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes the model first, got {type(model).__name__}: "
                "pass the module itself, not its parameters"
            )
        check_train_size(defaults["train_size"])
        self.model = model
        before = set(vars(self))
        self._guarded: bool
        self._prepare()
        self._prepared = set(vars(self)) - before
        super().__init__(parameter_groups(model, params), defaults)
        # Buffers that training changes: those of modules that are in training mode, now or at the end.
        self._changing = set(held_names(model, ()))
        if generator is None:
            device = self.param_groups[0]["params"][0].device
            seed = int(torch.randint(2**62, ())) + distributed.rank()
            generator = torch.Generator(device).manual_seed(seed)
        self.generator = generator
        self._guard()

    def draws_apart(self) -> bool:
        """Whether each process of a group has weights of its own now, because it draws them by itself."""
        return False

    def _guard(self) -> None:
        """Watch for DDP, once there is a group of processes."""
        if not self._guarded and distributed.in_group():
            self._guarded = True
            trained = (p for group in self.param_groups for p in group["params"])
            AveragingGuard(self).watch(self.model, trained)

    def _prepare(self) -> None:
        """Set what is derived from the model, such as names by `id`, and state that lives for one step only.

        Called before any groups exist, and again for a copy. Attributes set here are not copied.
        """
        self._names = {id(p): name for name, p in named_parameters(self.model).items()}
        self._workspace = Workspace()
        self._guarded = False

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more of the model's parameters; options in the group override the defaults."""
        super().add_param_group(parameter_groups(self.model, [param_group])[0])
        try:
            added = {self._names[id(p)]: p for p in self.param_groups[-1]["params"]}
            check_types(self.model, added, sparse_gradients=self.takes_sparse_gradients)
        except BaseException:
            self.param_groups.pop()
            raise

    def _not_finite(self, p: Tensor) -> FloatingPointError:
        """Return the error for a parameter whose gradient is not finite."""
        done = max((state.get("step", 0) for state in self.state.values()), default=0)
        return FloatingPointError(
            f"the gradient of {self._names[id(p)]!r} is not finite, so this step, after {done} others, was "
            "not taken: check the loss and the data, or use a smaller step"
        )

    # State.

    def _new_state(self, params: Iterable[Tensor], **values: float) -> None:
        """Give each parameter a step count of 0 and, for every name, a tensor filled with its value.

        The tensors are adjacent in memory, so that small ones need not be copied together at every step.
        """
        kinds: dict[Any, list[Tensor]] = {}
        for p in params:
            self.state[p]["step"] = 0
            kinds.setdefault((p.device, p.dtype), []).append(p)
        for some in kinds.values():
            sizes = [p.numel() for p in some]
            for name, value in values.items():
                parts = some[0].new_full([sum(sizes)], value, requires_grad=False).split(sizes)
                for p, part in zip(some, parts, strict=True):
                    self.state[p][name] = part.view(p.shape)

    def _held(self) -> list[str]:
        """Name what a posterior has to hold: the weights that were trained, and what changed with them."""
        trained = {
            self._names[id(p)]
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad or self.state.get(p)
        }
        return held_names(self.model, trained, self._changing)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state and that of the generator."""
        state = super().state_dict()
        state["generator"] = {"state": self.generator.get_state(), "rank": distributed.rank()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state: bit for bit on the same rank, with independent noise on another."""
        super().load_state_dict(state_dict)
        saved = state_dict.get("generator")
        if saved is not None:
            self.generator.set_state(saved["state"].cpu())
            if saved["rank"] != distributed.rank():
                device = self.generator.device
                seed = int(torch.randint(2**62, (), generator=self.generator, device=device))
                self.generator.manual_seed(seed + distributed.rank())

    def __repr__(self) -> str:
        count = sum(p.numel() for group in self.param_groups for p in group["params"])
        groups = len(self.param_groups)
        options = ", ".join(
            f"{name}={_shown(value)}"
            for name, value in self.param_groups[0].items()
            if name != "params" and _is_set(value)
        )
        several = f" in {groups} groups" if groups > 1 else ""
        of = type(unwrapped(self.model)).__name__
        return f"{type(self).__name__}({count:,} weights of {of}{several}: {options})"

    def __getstate__(self) -> dict[str, Any]:
        # As in torch, hooks are not copied, nor is an instance's `step`, which a scheduler has patched.
        return {
            name: value
            for name, value in vars(self).items()
            if name not in {"step", *self._prepared} and not name.startswith("_optimizer_")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()
