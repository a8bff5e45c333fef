"""Per-example statistics of gradients, gathered while an ordinary backward pass runs.

A `Capture` watches the torch functions that a model calls. Where a weight meets data, a rule for that
function (see `rules`) notes the input and, on the way back, the gradient of the output; from the two
follow the gradients of single examples. Because functions are watched, not modules, it makes no
difference whether a weight is used by a layer, by `F.linear` in someone's own module, or several times.

Three kinds of tensors are told apart: *weights*; *derived* tensors, computed from weights (and buffers)
alone, such as the weight of a weight-normalised layer; and data. A gradient of a derived tensor is pulled
back to its weights, example by example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchbayes.curvature.derived import Derived, random_transform
from torchbayes.curvature.factors import FactorSums
from torchbayes.curvature.generic import broadcasts_examples, generic, is_in_place, record_broadcast
from torchbayes.curvature.loss import check_mean_loss
from torchbayes.curvature.opened import opened
from torchbayes.curvature.products import CHUNK, Scratch
from torchbayes.curvature.record import Record, add_squares
from torchbayes.curvature.rules import RULES

__all__ = ["Capture", "Use"]

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_ATTENTION = torch.nn.functional.multi_head_attention_forward


class Use:
    """One use of a weight in a forward pass."""

    __slots__ = ("capture", "done", "target")

    def __init__(self, capture: Capture, target: Tensor) -> None:
        self.capture, self.target, self.done = capture, target, False

    def begin(self, examples: int) -> bool:
        """Say that the output's gradient has arrived; whether this is the weight's only use."""
        return self.capture._begin(self, examples)

    def arrived(self, record: Record) -> None:
        """Hand over the record of this use, at once or to be added to those of other uses."""
        if self.begin(record.examples):
            total, fresh = self.capture.sink(self.target)
            record.write_to(total, fresh)
        else:
            self.capture.defer(record)


class Capture(TorchFunctionMode):
    """Sums over examples of squared gradients, for a model's weights.

    Inside `with capture.block():` run forward and backward passes as usual; ordinary gradients arrive in
    `.grad` as ever. Afterwards `squares(p)` is the mean over examples of the squared gradient of one
    example's loss. All backward passes of a block together are taken to be of one mean loss, so
    micro-batches weighted by their share of the batch are exact.

    Args:
        model: The network; the first dimension of its first input counts the examples.
        parameters: The weights to watch, by name.
        factors: The names of weights of linear and convolution layers for which to gather Kronecker
            factors instead of squares, each with the name of the bias that goes with it, if any.

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
                f"{type(model).__name__} is a scripted module, into which torchbayes cannot see: pass the "
                "plain module"
            )
        self.model = model
        self.names = {id(p): name for name, p in parameters.items()}
        self._weights = {id(p): p for p in parameters.values()}
        self.factors = {
            id(parameters[weight]): FactorSums(
                parameters[weight], None if bias is None else parameters[bias]
            )
            for weight, bias in ({} if factors is None else factors).items()
        }
        self._totals: dict[int, Tensor] = {}
        self.scratch = Scratch()
        self._clear()

    def _clear(self) -> None:
        self.examples = 0
        """The examples of all backward passes of the last block."""
        self.unscaled: float | None = None
        """What a `GradScaler` has multiplied the gradients by inside the block, if it has."""
        self.sequence_batch: int | None = None
        self._written: set[int] = set()
        self._seen: set[int] = set()
        self._batch: int | None = None
        self._pass_examples: int | None = None
        self._pending: dict[int, int] = {}
        self._deferred: list[Record] = []
        self._derived: dict[int, Derived] = {}
        self._spread: dict[int, tuple[Tensor, Tensor]] = {}
        self._buffers: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        for sums in self.factors.values():
            sums.clear()

    @contextmanager
    def block(self) -> Iterator[None]:
        """Watch what happens inside; nothing of it is left after an exception."""
        self._clear()
        self._buffers = {id(b): b for b in self.model.buffers()}
        before = {key: _grad_mark(p) for key, p in self._weights.items()}
        handle = self.model.register_forward_pre_hook(self._saw_inputs, with_kwargs=True)
        try:
            with self:
                yield
        except BaseException:
            self._clear()
            raise
        finally:
            handle.remove()
            # These hold the graph's tensors alive.
            self._derived, self._spread, self._deferred = {}, {}, []
            self._buffers, self._constants = {}, {}
        for key, p in self._weights.items():
            if key not in self._seen and p.requires_grad and _grad_mark(p) != before[key]:
                raise ValueError(
                    f"weight {self.names[key]!r} has a gradient but torchbayes did not see where it was "
                    "used: call the plain module, not a scripted or compiled one, inside the closure or "
                    "sampled()"
                )

    def _saw_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for leaf in leaves:
            self._constants.pop(id(leaf), None)  # also if it was made inside the block
        self._batch = next((t.shape[0] for t in leaves if t.dim() > 0), None)

    # Results.

    def squares(self, parameter: Tensor) -> Tensor | None:
        """The mean over examples of squared gradients, a new tensor; None if the weight was not used."""
        total = self.sum_of_squares(parameter)
        return None if total is None else total * self.examples

    def sum_of_squares(self, parameter: Tensor) -> Tensor | None:
        """Σᵢ (∇ℓᵢ / M)², in a buffer that the next block overwrites; None if the weight was not used."""
        return self._totals[id(parameter)] if id(parameter) in self._written else None

    # For the rules.

    def target(self, tensor: Any) -> Tensor | None:
        """The tensor, if it is a weight or derived and wants a gradient."""
        key = id(tensor)
        if not isinstance(tensor, Tensor):
            return None
        if key in self._spread:
            raise ValueError(
                f"{self.describe(self._spread[key][1])} was expanded to the number of examples and then used as "
                "the weight of a layer: torchbayes cannot tell rows from examples, so expand it to another "
                "size or choose another batch size"
            )
        known = key in self._weights or key in self._derived
        return tensor if known and tensor.requires_grad else None

    def use(self, target: Tensor) -> Use:
        """Note a use of a weight in the forward pass."""
        for root in self._roots(target):
            key = id(root)
            self._pending[key] = self._pending.get(key, 0) + 1
            self._seen.add(key)
        return Use(self, target)

    def check_examples(self, rows: int, target: Tensor) -> None:
        """Raise a `ValueError` if a layer gets another number of rows than the model got examples."""
        if self._batch is not None and rows != self._batch:
            raise ValueError(
                f"{self.describe(target)} gets {rows} rows but the model was given {self._batch} examples: "
                "per-example gradients need the examples in dimension 0 of every layer's input (for a "
                "sequence model batch_first=True; do not fold other dimensions into the batch)"
            )

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor has nothing to do with the examples: weights, buffers, `torch.arange`."""
        key = id(tensor)
        if key in self._weights or key in self._derived or key in self._buffers:
            return True
        # A constant with a row per example, such as an initial state of zeros, is as good as data.
        rows = tensor.dim() > 1 and tensor.shape[0] == self._batch
        return key in self._constants and not rows

    def defer(self, record: Record) -> None:
        """Keep a record of a weight that has other uses until the end of the backward pass."""
        self._deferred.append(record)

    def sink(self, target: Tensor) -> tuple[Tensor, bool]:
        """Where to add squared gradients of a weight, and whether to overwrite instead."""
        key = id(target)
        total = self._totals.get(key)
        if total is None or total.shape != target.shape or total.device != target.device:
            dtype = torch.promote_types(target.dtype, torch.float32)
            total = torch.empty_like(target, dtype=dtype, requires_grad=False)
            self._totals[key] = total
        fresh = key not in self._written
        self._written.add(key)
        return total, fresh

    # The mode.

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function; where it brings a weight and data together, note both."""
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is _UNSCALE:
            return self._unscale(*args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        weights, constant = self._scan((*args, *kwargs.values()) if kwargs else args)
        if not weights:
            outputs = func(*args, **kwargs)
            if constant and isinstance(outputs, Tensor):
                self._constants[id(outputs)] = outputs
            return outputs
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        inside = opened(func)
        if inside is None:
            return self.other(func, args, kwargs)
        before = self.sequence_batch
        if func is _ATTENTION:
            query = args[0] if args else kwargs["query"]
            self.sequence_batch = query.shape[1] if query.dim() == 3 else 1
        try:
            with self:
                return inside(*args, **kwargs)
        finally:
            self.sequence_batch = before

    def _scan(self, values: Iterable[Any]) -> tuple[bool, bool]:
        """Whether there is a weight or derived tensor among the values, and whether all are constants."""
        weights, constant = False, True
        for value in values:
            if isinstance(value, Tensor):
                key = id(value)
                if key in self._weights or key in self._derived or key in self._spread:
                    weights = True
                elif constant and key not in self._constants and key not in self._buffers:
                    constant = False
            elif type(value) in (list, tuple) and value:
                inside = self._scan(value)
                weights, constant = weights or inside[0], constant and inside[1]
        return weights, constant

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that no rule knows."""
        outputs = func(*args, **kwargs)
        found = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if not found:
            return outputs
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        tracked = [t for t in tensors if id(t) in self._weights or id(t) in self._derived]
        targets = [t for t in tracked if t.requires_grad]
        if not targets:
            return outputs
        data = [t for t in tensors if self._is_data(t)]
        if data:
            if is_in_place(func):
                raise ValueError(
                    f"{self.describe(targets[0])} is used by the in-place function {func.__name__!r}: write "
                    "it out of place, as in x = x * w, so that torchbayes can see both its inputs"
                )
            generic(self, func, args, kwargs, data, targets, outputs)
            return outputs
        dimension = 0 if self.sequence_batch is None else 1
        examples = self._batch if self.sequence_batch is None else self.sequence_batch
        if broadcasts_examples(func, targets[0], found[0], dimension, examples):
            record_broadcast(self, targets[0], found[0], dimension)
            self._spread[id(found[0])] = (found[0], targets[0])
            return outputs
        for root in {id(r): r for t in targets for r in self._roots(t)}.values():
            self._seen.add(id(root))
        for place, leaf in enumerate(tree_leaves(outputs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                parents = {id(t): self._derived[id(t)] for t in targets if id(t) in self._derived}
                self._derived[id(leaf)] = Derived(leaf, func, args, kwargs, place, targets, parents)
        return outputs

    def _is_data(self, tensor: Tensor) -> bool:
        """Whether a tensor has an entry per example, as far as one can tell from its shape."""
        if self.is_constant(tensor):
            return False
        if self._batch is None:
            return tensor.dim() > 0
        place = 0 if self.sequence_batch is None else 1
        size = self._batch if self.sequence_batch is None else self.sequence_batch
        return tensor.dim() > place and tensor.shape[place] == size

    def _roots(self, target: Tensor) -> list[Tensor]:
        derived = self._derived.get(id(target))
        return [target] if derived is None else derived.roots

    def describe(self, target: Tensor) -> str:
        """A weight's name, for messages; of a derived tensor, that of the first weight it is made of."""
        return f"weight {self.names[id(self._roots(target)[0])]!r}"

    # Backward.

    def _backward(
        self,
        loss: Tensor,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if self._batch is not None:
            check_mean_loss(loss, self._batch)
        # Inside the mode, so that what checkpointing computes again is seen by the same rules.
        with self:
            torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)

    def _unscale(self, gradients: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
        own = {id(p.grad) for p in self._weights.values() if p.grad is not None}
        if any(id(g) in own for g in gradients):
            self.unscaled = float(inv_scale)
        _UNSCALE(gradients, found_inf, inv_scale)

    def _begin(self, use: Use, examples: int) -> bool:
        if use.done:
            raise ValueError(
                f"{self.describe(use.target)} was differentiated twice through one forward pass: add the "
                "losses up and call backward() once"
            )
        use.done = True
        if self._pass_examples is None:
            self._pass_examples = examples
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        elif self._pass_examples != examples:
            raise ValueError(
                f"{self.describe(use.target)} saw {examples} examples in a backward pass in which another "
                f"layer saw {self._pass_examples}: every layer must see all examples of the batch"
            )
        unique = id(use.target) in self._weights and self._pending[id(use.target)] == 1
        if unique and self._deferred:
            unique = all(use.target is not r for d in self._deferred for r in self._roots(d.target))
        for root in self._roots(use.target):
            self._pending[id(root)] -= 1
        return unique

    def _finish(self) -> None:
        """At the end of a backward pass: weights that were used several times, and derived ones."""
        assert self._pass_examples is not None
        examples, self._pass_examples = self._pass_examples, None
        records, self._deferred = self._deferred, []
        self.examples += examples
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for group in _connected(records, self._roots):
                self._add_group(group, examples)

    def _add_group(self, records: list[Record], examples: int) -> None:
        """Square the sums, over all uses, of each example's gradients."""
        roots = {id(r): r for record in records for r in self._roots(record.target)}
        if len(roots) == 1 and all(id(r.target) in roots for r in records):
            joined = type(records[0]).joined(records) if len(records) > 1 else records[0]
            if joined is not None:
                joined.write_to(*self.sink(joined.target))
                return
        sinks = {key: self.sink(root) for key, root in roots.items()}
        for total, fresh in sinks.values():
            if fresh:
                total.zero_()
        step = max(1, CHUNK // max(1, sum(t.numel() for t, _ in sinks.values())))
        pulls = {
            id(r.target): self._derived[id(r.target)].pullback(
                random_transform(self.describe(r.target))
            )
            for r in records
            if id(r.target) in self._derived
        }
        for start in range(0, examples, step):
            sums: dict[int, Tensor] = {}
            for record in records:
                gradients = record.per_example(start, min(start + step, examples))
                pull = pulls.get(id(record.target))
                pieces = [(record.target, gradients)] if pull is None else pull(gradients)
                for root, piece in pieces:
                    key = id(root)
                    sums[key] = sums[key].add_(piece) if key in sums else piece.clone()
            for key, gradients in sums.items():
                add_squares(gradients, sinks[key][0])


def _grad_mark(parameter: Tensor) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _connected(
    records: list[Record], roots: Callable[[Tensor], list[Tensor]]
) -> list[list[Record]]:
    """Records in groups that share no weight."""
    groups: list[tuple[set[int], list[Record]]] = []
    for record in records:
        keys = {id(r) for r in roots(record.target)}
        joined = [g for g in groups if g[0] & keys]
        merged = [r for _, members in joined for r in members] + [record]
        groups = [g for g in groups if not g[0] & keys]
        groups.append((keys.union(*(g[0] for g in joined)), merged))
    return [members for _, members in groups]
