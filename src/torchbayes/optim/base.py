"""The base of every optimiser here: built from a model, with its own random generator, saved with both."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core import distributed, shards
from torchbayes.core.averaging import AveragingGuard
from torchbayes.core.device import generator_state
from torchbayes.core.late import Late, LateError
from torchbayes.core.names import named_parameters, unwrapped
from torchbayes.core.parameters import Params, check_types, parameter_groups
from torchbayes.core.workspace import Workspace, first_nonfinite
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
    needs_whole_weights = "its step needs whole weights"
    """Why it cannot train a model whose weights are shared out over processes; empty if it can."""

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
        first = self.param_groups[0]["params"][0]
        if generator is None:
            seed = int(torch.randint(2**62, ())) + (0 if self._sharded else distributed.rank())
            if self._sharded:  # one set of weights, and one source of noise
                seed = int(distributed.of_first(seed, shards.all_groups(first)))
            generator = torch.Generator(first.device).manual_seed(seed)
        self.generator = generator
        if self._sharded:
            self._check_generators()
            self._create_state()
        self._guard()

    def _check_generators(self) -> None:
        state = generator_state(self.generator).numpy().tobytes()
        groups = shards.all_groups(self.param_groups[0]["params"][0])
        # In every group, whatever the ones before have said: the others of it wait for this process.
        alike = [distributed.alike(state, group) for group in groups]
        if not all(alike):
            raise ValueError(
                "the generators of the processes differ, but a sharded model has one set of weights and so "
                "one draw of them: seed the generator alike in every process, or leave it out"
            )

    def _agreed(self, bad: int | None, examples: float = 0.0) -> tuple[int | None, float]:
        """Return the first index of a bad gradient in any process, and the examples of all processes.

        Args:
            bad: The index that this process has found, or None.
            examples: How many examples it has seen.
        """
        if not self._sharded:
            return bad, examples
        first = self.param_groups[0]["params"][0]
        groups = shards.all_groups(first)
        total, odd = distributed.total([examples, float(bad is not None)], groups)
        if not odd:
            return None, total
        places = [0.0] * sum(len(group["params"]) for group in self.param_groups)
        if bad is not None:
            places[bad] = 1.0
        found = distributed.total(places, groups)
        return next(i for i, count in enumerate(found) if count), total

    def _sum(self, values: list[float]) -> list[float]:
        """Return sums over the parts of all processes of sums over parts of weights."""
        if not self._sharded:
            return values
        return distributed.total(values, shards.sharding_groups(self.param_groups[0]["params"][0]))

    def _create_state(self) -> None:
        """Give all weights the state that they would have before their first step.

        `torch.distributed.checkpoint` loads into tensors that are there.
        """

    def _only_prepares(self, closure: Callable[[], Any] | None) -> bool:
        """Whether this is a step of `torch.distributed.checkpoint`, which only wants there to be a state.

        It sets rates and gradients to 0. The state is created then, without a step.
        """
        if closure is not None or self.state or any(group["lr"] for group in self.param_groups):
            return False
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not gradients or any(bool(g.to_dense().any()) for g in gradients):
            return False
        self._create_state()
        return True

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
        self._late = (
            Late()
        )  # the largest entries of an accelerator's gradients, until they are looked at
        self._guarded = False
        self._sharded = False  # whether the weights are shared out over processes (`fully_shard`)

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more of the model's parameters; options in the group override the defaults."""
        super().add_param_group(parameter_groups(self.model, [param_group])[0])
        try:
            added = {self._names[id(p)]: p for p in self.param_groups[-1]["params"]}
            check_types(self.model, added, sparse_gradients=self.takes_sparse_gradients)
            trained = {self._names[id(p)]: p for g in self.param_groups for p in g["params"]}
            shards.check_alike(trained)
            self._sharded = any(map(shards.is_sharded, trained.values()))
            if self.needs_whole_weights:
                shards.refuse_sharded(
                    trained.values(),
                    f"{type(self).__name__} cannot train a model that fully_shard has shared out, because "
                    f"{self.needs_whole_weights}: use IVON or a sampler such as SGLD or ATMC, or keep the "
                    "whole model in every process",
                )
        except BaseException:
            self.param_groups.pop()
            raise

    def _checked(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> int | None:
        """Return the index of the first gradient that is not finite, or None.

        To look at an accelerator's at once would be to wait for it: those of the step before are looked at.

        Raises:
            LateError: If one of those was not finite.
        """
        devices = {gradient.device for gradient in gradients}
        if self._sharded or len(devices) != 1 or next(iter(devices)).type == "cpu":
            return first_nonfinite(gradients)
        self.look()
        some = [i for i, gradient in enumerate(gradients) if gradient.numel()]
        if some:
            largest = torch._foreach_norm([gradients[i] for i in some], math.inf)
            names = [self._names[id(params[i])] for i in some]
            self._late.exchange(dict(zip(names, largest, strict=True)), self._done)
        return None

    def look(self) -> None:
        """Look at the last step's gradients, if they are on an accelerator and have not been looked at.

        `step`, `state_dict` and `posterior` do so.

        Raises:
            FloatingPointError: If one of them was not finite.
        """
        largest, done = self._late.rest() or ({}, 0)
        bad = next((name for name, value in largest.items() if not math.isfinite(value)), None)
        if bad is not None:
            raise LateError(
                f"the gradient of {bad!r} was not finite in the last step, after {done} others, which an "
                "accelerator shows afterwards, so the weights are not to be used: go back to a checkpoint "
                "and check the loss and the data, or use a smaller step"
            )

    @property
    def _done(self) -> int:
        """Number of steps that have been taken."""
        return max((state.get("step", 0) for state in self.state.values()), default=0)

    def _not_finite(self, p: Tensor) -> FloatingPointError:
        """Return the error for a parameter whose gradient is not finite."""
        return FloatingPointError(
            f"the gradient of {self._names[id(p)]!r} is not finite, so this step, after {self._done} others, "
            "was not taken: check the loss and the data, or use a smaller step"
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
            own = [shards.local(p) for p in some]
            sizes = [p.numel() for p in own]
            for name, value in values.items():
                parts = own[0].new_full([sum(sizes)], value, requires_grad=False).split(sizes)
                for p, like, part in zip(some, own, parts, strict=True):
                    self.state[p][name] = shards.wrapped(part.view(like.shape), p)

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
        self.look()
        state = super().state_dict()
        rank = 0 if self._sharded else distributed.rank()
        state["generator"] = {"state": generator_state(self.generator), "rank": rank}
        # torch.distributed.checkpoint keeps nothing but the states of weights and the groups.
        state["param_groups"][0]["generator_state"] = generator_state(self.generator)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state: bit for bit on the same rank, with independent noise on another."""
        self._late = Late()
        super().load_state_dict(state_dict)
        kept = self.param_groups[0].pop("generator_state", None)
        saved = state_dict.get("generator")
        if saved is None and kept is not None:
            saved = {"state": kept, "rank": 0}
        if saved is not None:
            self.generator.set_state(saved["state"].cpu())
            if saved["rank"] != distributed.rank() and not self._sharded:
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
        self.look()
        # As in torch, hooks are not copied, nor is an instance's `step`, which a scheduler has patched.
        return {
            name: value
            for name, value in vars(self).items()
            if name not in {"step", *self._prepared} and not name.startswith("_optimizer_")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()
        self._sharded = any(shards.is_sharded(p) for g in self.param_groups for p in g["params"])
