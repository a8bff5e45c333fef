"""Per-example statistics of gradients, gathered while an ordinary backward pass runs.

A `Capture` watches the torch functions that a model calls. Where a weight meets data, a rule for that
function (see `rules`) notes the input and, in the backward pass, the gradient of the output; the two
determine the gradients of single examples. Because functions are watched, not modules, it makes no
difference whether a weight is used by a layer, by `F.linear` in a user's own module, or several times.

There are three kinds of tensors: *weights*; *derived* tensors, computed from weights (and buffers)
alone, such as the weight of a weight-normalised layer; and data. A gradient of a derived tensor is pulled
back to its weights, example by example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchbayes.core.batch import LossWeights, is_plain_backward, uncompiled
from torchbayes.core.shards import local
from torchbayes.curvature.accumulate import Record, Uses
from torchbayes.curvature.composite import opened
from torchbayes.curvature.derived import Derived
from torchbayes.curvature.factors import FactorSums
from torchbayes.curvature.generic import broadcasts_examples, generic, is_in_place, record_broadcast
from torchbayes.curvature.rules import RULES

__all__ = ["Capture", "Tracker", "has_new_gradient", "is_marked", "mark_gradients"]

# Called on weights all the time, only to query them.
_PLAIN = {
    *(
        getattr(Tensor, name).__get__
        for name in ("grad", "shape", "device", "dtype", "requires_grad")
    ),
    getattr(Tensor, "grad").__set__,  # noqa: B009
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
}
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_ATTENTION = torch.nn.functional.multi_head_attention_forward


class Tracker:
    """Knowledge of the tensors that a forward pass uses, by their identity.

    Args:
        parameters: The weights, by name.

    Attributes:
        batch: Number of examples that the model was last called with, if it was.
        largest_batch: Largest number of examples that the model was called with in the last block.
        sequence_batch: Number of examples while attention runs, which has them in dimension 1.
        derived: Tensors computed from weights and constants, by id.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.names = {id(p): name for name, p in parameters.items()}
        self.weights = {id(p): p for p in parameters.values()}
        self.largest_batch = 0
        self.forget()

    def forget(self) -> None:
        """Forget everything except the weights."""
        self.batch: int | None = None
        self.sequence_batch: int | None = None
        self.derived: dict[int, Derived] = {}
        self._spread: dict[int, tuple[Tensor, Tensor]] = {}
        self._constants: dict[int, Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        """Start a block of forward passes of `model`."""
        self.forget()
        self.largest_batch = 0
        self._constants = {id(b): b for b in model.buffers()}

    def saw_inputs(self, inputs: Any) -> None:
        """Note the inputs that the model is called with."""
        leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        for leaf in leaves:
            self._constants.pop(id(leaf), None)  # data, even if it was made inside the block
        self.batch = next((t.shape[0] for t in leaves if t.dim() > 0), None)
        self.largest_batch = max(self.largest_batch, self.batch or 0)

    @property
    def layout(self) -> tuple[int, int | None]:
        """Dimension of the examples, and their number."""
        return (0, self.batch) if self.sequence_batch is None else (1, self.sequence_batch)

    def scan(self, values: Iterable[Any]) -> tuple[bool, bool]:
        """Whether there is a weight or derived tensor among the values, and whether all are constants."""
        weights, constant = False, True
        for value in values:
            if isinstance(value, Tensor):
                key = id(value)
                if key in self.weights or key in self.derived or key in self._spread:
                    weights = True
                elif constant and key not in self._constants:
                    constant = False
            elif type(value) in (list, tuple) and value:
                inside = self.scan(value)
                weights, constant = weights or inside[0], constant and inside[1]
        return weights, constant

    def add_constant(self, tensor: Tensor) -> None:
        """Note a tensor that was computed without data, such as the result of `torch.arange`."""
        self._constants[id(tensor)] = tensor

    def add_derived(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        targets: list[Tensor], outputs: Any,
    ) -> None:  # fmt: skip
        """Note what a function computed from weights and constants."""
        parents = {id(t): self.derived[id(t)] for t in targets if id(t) in self.derived}
        for place, leaf in enumerate(tree_leaves(outputs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.derived[id(leaf)] = Derived(leaf, func, args, kwargs, place, targets, parents)

    def add_spread(self, output: Tensor, target: Tensor) -> None:
        """Note a weight that was expanded to one copy per example: from here on it is data."""
        self._spread[id(output)] = (output, target)

    def target(self, tensor: Any) -> Tensor | None:
        """Return the tensor if it is a weight or derived and requires a gradient."""
        if not isinstance(tensor, Tensor):
            return None
        key = id(tensor)
        if key in self._spread:
            raise ValueError(
                f"{self.describe(self._spread[key][1])} was expanded to the number of examples and then used "
                "as the weight of a layer: torchbayes cannot tell its rows from examples, so expand it to "
                "another size or choose another batch size"
            )
        known = key in self.weights or key in self.derived
        return tensor if known and tensor.requires_grad else None

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is independent of the examples."""
        key = id(tensor)
        if key in self.weights or key in self.derived:
            return True
        # A constant with a row per example, such as an initial state of zeros, counts as data.
        rows = tensor.dim() > 1 and tensor.shape[0] == self.batch
        return key in self._constants and not rows

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a tensor has an entry per example, judging by its shape."""
        if self.is_constant(tensor):
            return False
        dimension, examples = self.layout
        if examples is None:
            return tensor.dim() > 0
        return tensor.dim() > dimension and tensor.shape[dimension] == examples

    def check_examples(self, rows: int, *targets: Tensor | None) -> None:
        """Raise a `ValueError` if a layer gets a different number of rows than the model got examples."""
        if self.batch is not None and rows != self.batch:
            first = next(target for target in targets if target is not None)
            raise ValueError(
                f"{self.describe(first)} gets {rows} rows but the model was given {self.batch} examples: "
                "per-example gradients need the examples in dimension 0 of every layer's input (for a "
                "sequence model batch_first=True; do not fold other dimensions into the batch)"
            )

    def roots(self, target: Tensor) -> list[Tensor]:
        """Return the weights that a tensor is computed from, or the weight itself."""
        derived = self.derived.get(id(target))
        return [target] if derived is None else derived.roots

    def describe(self, target: Tensor) -> str:
        """Return a weight's name, for messages; for a derived tensor, that of its first weight."""
        return f"weight {self.names[id(self.roots(target)[0])]!r}"


def mark_gradients(parameters: Iterable[Tensor]) -> None:
    """Mark the current gradients.

    The mark is on the tensor itself: an id may be reused once `zero_grad` has released a gradient, and a
    reference would keep it in memory.
    """
    for p in parameters:
        if p.grad is not None:
            gradient = _own(p.grad)
            gradient._torchbayes_mark = gradient._version  # type: ignore[attr-defined]


def is_marked(parameter: Tensor) -> bool:
    """Whether the gradient of a parameter is the tensor that was marked, changed or not."""
    return parameter.grad is not None and hasattr(_own(parameter.grad), "_torchbayes_mark")


def has_new_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient that is not the marked one."""
    if parameter.grad is None:
        return False
    gradient = _own(parameter.grad)
    return getattr(gradient, "_torchbayes_mark", None) != gradient._version


def _own(gradient: Tensor) -> Tensor:
    """Return what a backward pass adds to: for a sharded model this process's part."""
    return gradient if type(gradient) is Tensor else local(gradient)


def _effective(passes: Sequence[tuple[float | None, float]]) -> float:
    """Return the effective number of examples of passes with a loss weight and a number of examples each."""
    weights = [weight for weight, _ in passes]
    if len(passes) == 1 or any(weight is None for weight in weights):
        return sum(n for _, n in passes)
    total = sum(weight or 0.0 for weight in weights)
    return total**2 / sum((weight or 0.0) ** 2 / n for weight, n in passes)


class Capture(TorchFunctionMode):
    """Sums over examples of squared gradients, for a model's weights.

    Inside `with capture.block():` run forward and backward passes as usual; ordinary gradients arrive in
    `.grad` as usual. Afterwards `squares(p)` is the mean over examples of the squared gradient of one
    example's loss. All backward passes of a block, and of later blocks that continue it, are together those
    of one mean loss: pieces of a batch whose losses are weighted by their share of it are exact.

    Args:
        model: The network; the first dimension of its first input counts the examples.
        parameters: The weights to watch, by name.
        factors: Names of weights of linear and convolution layers for which to compute Kronecker factors
            instead of squares, each with the name of its bias, if any.

    Example:
        >>> import torch
        >>> from torchbayes.curvature import Capture
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> capture = Capture(net, dict(net.named_parameters()))
        >>> with capture.block():
        ...     net(torch.tensor([[1.0], [3.0]])).mean().backward()
        >>> net.weight.grad.item(), capture.squares(net.weight).item()   # (1 + 3)/2, (1 + 9)/2
        (2.0, 5.0)
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        factors: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, torch.jit.ScriptModule):
            raise ValueError(
                f"{type(model).__name__} is a scripted module, which torchbayes cannot look into: pass the "
                "plain module"
            )
        self.model = model
        self.tracker = Tracker(parameters)
        self.uses = Uses(self.tracker)
        self.factors = {
            id(parameters[w]): FactorSums(parameters[w], None if b is None else parameters[b])
            for w, b in ({} if factors is None else factors).items()
        }
        self.tried: set[tuple[Any, int]] = set()
        """Functions and weights for which the generic rule is known to work."""
        self.unscaled: float | None = None
        """Factor by which a `GradScaler` has unscaled the gradients inside the block, if it has."""
        self.losses = LossWeights()
        """The losses that were differentiated."""

    @contextmanager
    def block(self, *, fresh: bool = True, examples: int | None = None) -> Iterator[None]:
        """Watch the passes inside; after an exception nothing is kept.

        Args:
            fresh: Whether to start new sums rather than to continue those of the last block.
            examples: Number of examples of which the block's loss is the mean; if None, those that the model
                was called with.
        """
        if fresh:
            self.restart()
        self.unscaled = None
        self.uses.clear()
        self.tracker.begin(self.model)
        mark_gradients(self.tracker.weights.values())
        handle = self.model.register_forward_pre_hook(self._called, with_kwargs=True)
        rows = {key: sums.rows for key, sums in self.factors.items()}
        self._before = len(self.uses.passes)
        try:
            with uncompiled(), self:
                yield
            self._check_seen()
        except BaseException:
            self.restart()
            raise
        finally:
            handle.remove()
            self.tracker.forget()
            self.uses.drop()
        self._count(rows, examples)

    def restart(self) -> None:
        """Start new sums, possibly in the middle of a block."""
        self._before = 0
        self.losses = LossWeights()
        self.uses.restart()
        for sums in self.factors.values():
            sums.restart()

    def _called(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.losses.calls += 1
        self.tracker.saw_inputs((args, kwargs))

    def _count(self, rows: dict[int, int], examples: int | None) -> None:
        """Count the examples of the block that ends."""
        passes, before = self.uses.passes, self._before
        seen = sum(n for _, n in passes[before:])
        if examples is not None and seen:
            passes[before:] = [(weight, n * examples / seen) for weight, n in passes[before:]]
            seen = examples
        for key, sums in self.factors.items():
            if sums.rows > rows[key] or (sums.rows and not sums.examples):
                sums.examples += seen

    def _check_seen(self) -> None:
        """Raise a `ValueError` if a weight got a gradient from a use that the mode has not seen."""
        for key, p in self.tracker.weights.items():
            if key not in self.uses.seen and p.requires_grad and has_new_gradient(p):
                raise ValueError(
                    f"{self.tracker.describe(p)} has a gradient but torchbayes did not see where it was "
                    "used: call the plain module, not a scripted one, and checkpoint activations "
                    "with use_reentrant=False"
                )

    # Results.

    @property
    def examples(self) -> float:
        """Number of examples of all backward passes."""
        return sum(n for _, n in self.uses.passes)

    @property
    def effective_examples(self) -> float:
        """Factor M that makes Σᵢ (cᵢ∇ℓᵢ)², with the losses' weights cᵢ, a mean of squares: (Σc)²/Σc².

        It is the number of examples if all have the same weight. A mean over n examples of weight w has
        cᵢ = w/n; where a weight is not known, all examples are taken to have the same.
        """
        return _effective(self.uses.passes)

    @property
    def under_way(self) -> tuple[float, float] | None:
        """What `examples` and `effective_examples` will be if this backward pass is the block's last one.

        None if no backward pass goes on that has met a weight.
        """
        now = self.uses.under_way
        if now is None:
            return None
        passes = [*self.uses.passes, now]
        return sum(n for _, n in passes), _effective(passes)

    def settled(self, parameter: Tensor) -> bool:
        """Whether the backward pass that goes on has nothing more to add to the squares of a weight."""
        return self.uses.settled(parameter)

    @property
    def largest_batch(self) -> int:
        """Largest number of examples that the model was called with in the last block."""
        return self.tracker.largest_batch

    def squares(self, parameter: Tensor) -> Tensor | None:
        """Return the mean over examples of squared gradients; None if the weight was not used."""
        total = self.sum_of_squares(parameter)
        return None if total is None else total * self.effective_examples

    def sum_of_squares(self, parameter: Tensor) -> Tensor | None:
        """Return Σᵢ (∇ℓᵢ / M)² in a buffer that the next block overwrites; None if the weight is unused."""
        return self.uses.total(parameter)

    # The mode.

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a torch function; where it brings a weight and data together, note both."""
        kwargs = {} if kwargs is None else kwargs
        if func in _PLAIN:
            return func(*args, **kwargs)
        if func is Tensor.backward:
            if self.uses.stale:
                self.restart()
            if is_plain_backward(func, kwargs):
                weight = self.losses.add(args[0], self.tracker.batch)
                self.uses.weight = None if weight is None else weight.nominal
            return func(*args, **kwargs)
        if func is _UNSCALE:
            return self._unscale(*args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        weights, constant = self.tracker.scan((*args, *kwargs.values()) if kwargs else args)
        if not weights:
            outputs = func(*args, **kwargs)
            if constant and isinstance(outputs, Tensor):
                self.tracker.add_constant(outputs)
            return outputs
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, func, *args, **kwargs)
        inside = opened(func)
        if inside is None:
            return self.other(func, args, kwargs)
        return self._open(func, inside, args, kwargs)

    def _open(
        self, func: Any, inside: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = self.tracker.sequence_batch
        if func is _ATTENTION:
            query = args[0] if args else kwargs["query"]
            self.tracker.sequence_batch = query.shape[1] if query.dim() == 3 else 1
        try:
            with self:
                return inside(*args, **kwargs)
        finally:
            self.tracker.sequence_batch = before

    def other(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function without a rule of its own: on weights alone, or on weights and data."""
        tracker, kwargs = self.tracker, {} if kwargs is None else kwargs
        outputs = func(*args, **kwargs)
        if not isinstance(outputs, (Tensor, tuple, list)):
            return outputs
        found = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = [t for t in tensors if id(t) in tracker.weights or id(t) in tracker.derived]
        targets = [t for t in known if t.requires_grad]
        if not found or not targets:
            return outputs
        data = [t for t in tensors if tracker.is_data(t)]
        if data:
            if is_in_place(func):
                raise ValueError(
                    f"{tracker.describe(targets[0])} is used by the in-place function {func.__name__!r}: "
                    "write it out of place, as in x = x * w, so that torchbayes can see both its inputs"
                )
            generic(self, func, args, kwargs, data, targets, outputs)
            return outputs
        dimension, examples = tracker.layout
        if broadcasts_examples(func, targets[0], found[0], dimension, examples):
            record_broadcast(self, targets[0], found[0], dimension)
            tracker.add_spread(found[0], targets[0])
            return outputs
        self.uses.seen.update(id(root) for t in targets for root in tracker.roots(t))
        tracker.add_derived(func, args, kwargs, targets, outputs)
        return outputs

    def watch(self, output: Tensor, target: Tensor, record: Callable[[Tensor], Record]) -> None:
        """Note a use of a weight, whose record is made from the output's gradient when it arrives."""
        use = self.uses.use(target)
        self.uses.on_gradient(output, lambda gradient: use.arrived(record(gradient)))

    def _unscale(self, gradients: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
        own = {id(p.grad) for p in self.tracker.weights.values() if p.grad is not None}
        if any(id(g) in own for g in gradients):
            self.unscaled = float(inv_scale)
        _UNSCALE(gradients, found_inf, inv_scale)
