"""Sums over examples of squared gradients, from the uses of weights.

A *use* is noted in the forward pass. Once the gradient of its output has arrived it has a *record*, which can
compute the gradients of single examples. They are those of the loss as it was differentiated, a mean over M
examples, so a record's gradient of example i is ∇ℓᵢ / M (times a loss scale, if any). Records never hold
examples × weights at once: they compute a few examples at a time.

The squares of a weight that is used once are added when its record arrives. The gradients of one that is used
several times, or through a derived tensor, must be summed over the uses before they are squared, example by
example: their records are kept until the end of the backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchbayes.core.workspace import Workspace

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Tracker

__all__ = ["CHUNK", "Record", "Use", "Uses", "VectorRecord", "wide"]

CHUNK = 2**20
"""Number of entries that a kept buffer holds, unless one example needs more."""


def wide(tensor: Tensor) -> Tensor:
    """Convert to at least single precision: squares of half-precision numbers over- and underflow."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _add_squares(gradients: Tensor, total: Tensor) -> None:
    """Add the squares of per-example gradients, of shape (examples, *weight), to `total`; overwrites them."""
    total.add_(gradients.square_().sum(0))


class Record(ABC):
    """One use of a weight in a forward pass that has been differentiated.

    Args:
        target: The weight, or a tensor computed from weights alone and used in the weight's place.
        examples: Number of examples.
    """

    def __init__(self, target: Tensor, examples: int) -> None:
        self.target, self.examples = target, examples

    @abstractmethod
    def per_example(self, start: int, stop: int) -> Tensor:
        """Return the gradients of examples start … stop − 1, a new tensor (stop − start, *weight)."""

    def write_to(self, total: Tensor, fresh: bool) -> None:
        """Add the sum over examples of squared gradients to `total`, or overwrite it if it is fresh."""
        if fresh:
            total.zero_()
        step = max(1, CHUNK // max(1, total.numel()))
        for start in range(0, self.examples, step):
            _add_squares(self.per_example(start, min(start + step, self.examples)), total)

    @classmethod
    def joined(cls, records: Sequence[Record]) -> Record | None:
        """Return one record with the summed gradients of several uses, if there is a cheap one."""
        return None


class VectorRecord(Record):
    """A use with so few weights that the gradients of all examples are kept: biases, norm scales.

    Args:
        target: The weight.
        gradients: Its gradients, of shape (examples, *weight).
        beside: For the bias of a linear map or convolution, the weight that is used with it.
    """

    def __init__(self, target: Tensor, gradients: Tensor, beside: Tensor | None = None) -> None:
        super().__init__(target, gradients.shape[0])
        self.gradients, self.beside = gradients, beside

    def per_example(self, start: int, stop: int) -> Tensor:
        """Return rows of the kept gradients."""
        return self.gradients[start:stop].clone()

    def write_to(self, total: Tensor, fresh: bool) -> None:
        """Square all gradients at once."""
        sums = self.gradients.square().sum(0)
        total.copy_(sums) if fresh else total.add_(sums)

    @classmethod
    def joined(cls, records: Sequence[Record]) -> Record | None:
        """Sum the kept gradients."""
        kept = [r.gradients for r in records if isinstance(r, VectorRecord)]
        if len(kept) < len(records):
            return None
        weights = {id(r.beside): r.beside for r in records if isinstance(r, VectorRecord)}
        beside = weights.popitem()[1] if len(weights) == 1 else None
        return cls(records[0].target, torch.stack(kept).sum(0), beside)


class Use:
    """One use of a weight in a forward pass."""

    __slots__ = ("done", "target", "uses")

    def __init__(self, uses: Uses, target: Tensor) -> None:
        self.uses, self.target, self.done = uses, target, False

    def begin(self, examples: int) -> bool:
        """Note that the output's gradient has arrived; return whether this is the weight's only use."""
        return self.uses.begin(self, examples)

    def sink(self) -> tuple[Tensor, bool]:
        """Return where to add the squares, and whether to overwrite instead."""
        return self.uses.sink(self.target)

    def defer(self, record: Record) -> None:
        """Keep the record until the end of the backward pass, because there are other uses."""
        self.uses.defer(record)

    def arrived(self, record: Record) -> None:
        """Add the squares of this use's record, now or at the end of the backward pass."""
        if self.begin(record.examples):
            record.write_to(*self.sink())
        else:
            self.defer(record)


class Uses:
    """All uses of all weights in a block of passes.

    Args:
        tracker: Knowledge of the tensors.
        keeps: Keep the records of a backward pass in `records` instead of adding their squares, and allow
            several passes through one graph. Rules then use the plain torch function and hooks alone, so
            that a pass to `edges` computes no gradient of a weight. The record of a weight's only use goes
            to `receiver` at once, if there is one, and is not kept.

    Attributes:
        passes: Weight of the loss, if known, and number of examples of each backward pass since `restart`.
        weight: Weight of the loss of the next backward pass, if known.
        seen: Ids of the weights that were used at all in the block.
        scratch: Buffers for the rules.
        records: The records of the last backward pass, if they are kept.
        edges: Where the graph must be differentiated to give every use its record.
    """

    def __init__(self, tracker: Tracker, keeps: bool = False) -> None:
        self.tracker, self.keeps = tracker, keeps
        self.receiver: Callable[[Record], None] | None = None
        self.scratch = Workspace()
        self._totals: dict[int, Tensor] = {}
        self.restart()
        self.clear()

    def restart(self) -> None:
        """Start sums; buffers are kept."""
        self.passes: list[tuple[float | None, float]] = []
        self._written: set[int] = set()

    def clear(self) -> None:
        """Start a block, which continues the sums."""
        self.seen: set[int] = set()
        self.weight: float | None = None
        self._pass_examples: int | None = None
        self._pending: dict[int, int] = {}
        self.drop()

    def drop(self) -> None:
        """Release the graph's tensors."""
        self.records: list[Record] = []
        self.edges: dict[GradientEdge, None] = {}
        self._deferred: list[Record] = []
        self._deferred_roots: set[int] = set()

    @property
    def stale(self) -> bool:
        """Whether the gradients that the sums belong to have been cleared."""
        weights = self.tracker.weights
        return bool(self._written) and all(weights[key].grad is None for key in self._written)

    def total(self, parameter: Tensor) -> Tensor | None:
        """Return the sum of squares of a weight; None if it was not used."""
        return self._totals[id(parameter)] if id(parameter) in self._written else None

    @property
    def under_way(self) -> tuple[float | None, float] | None:
        """What `passes` will have of the backward pass that goes on; None if none does."""
        return None if self._pass_examples is None else (self.weight, self._pass_examples)

    def settled(self, parameter: Tensor) -> bool:
        """Whether all uses of a weight have been differentiated and squared."""
        key = id(parameter)
        return not self._pending.get(key) and key not in self._deferred_roots

    def use(self, target: Tensor) -> Use:
        """Note a use in the forward pass."""
        for root in self.tracker.roots(target):
            key = id(root)
            self._pending[key] = self._pending.get(key, 0) + 1
            self.seen.add(key)
        return Use(self, target)

    def on_gradient(self, output: Tensor, then: Callable[[Tensor], None]) -> None:
        """Call `then` with the gradient of `output` when it arrives, without a graph and unseen by modes."""

        def arrived(gradient: Tensor) -> None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                then(gradient)

        output.register_hook(arrived)
        if self.keeps:  # of the output as it is now: an in-place function may follow
            self.edges[get_gradient_edge(output)] = None

    def sink(self, target: Tensor) -> tuple[Tensor, bool]:
        """Return where to add squared gradients of a weight, and whether to overwrite instead."""
        key = id(target)
        total = self._totals.get(key)
        if total is None or total.shape != target.shape or total.device != target.device:
            dtype = torch.promote_types(target.dtype, torch.float32)
            total = torch.empty_like(
                target, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format
            )
            self._totals[key] = total
        fresh = key not in self._written
        self._written.add(key)
        return total, fresh

    def defer(self, record: Record) -> None:
        """Keep a record until the end of the backward pass."""
        key = id(record.target)
        if self.receiver is not None and key in self.tracker.weights and self._pending[key] == 1:
            self.receiver(record)
            return
        self._deferred.append(record)
        self._deferred_roots.update(id(r) for r in self.tracker.roots(record.target))

    def begin(self, use: Use, examples: int) -> bool:
        """Count a use as differentiated; return whether it is the weight's only one."""
        target = use.target
        if use.done and not self.keeps:
            raise ValueError(
                f"{self.tracker.describe(target)} was differentiated twice through one forward pass: add the "
                "losses up and call backward() once"
            )
        use.done = True
        if self._pass_examples is None:
            self._pass_examples = examples
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        elif self._pass_examples != examples:
            raise ValueError(
                f"{self.tracker.describe(target)} saw {examples} examples in a backward pass in which "
                f"another layer saw {self._pass_examples}: every layer must see all examples of the batch"
            )
        if self.keeps:
            return False
        key = id(target)
        unique = key in self.tracker.weights and self._pending[key] == 1
        for root in self.tracker.roots(target):
            self._pending[id(root)] -= 1
        return unique and key not in self._deferred_roots

    def _finish(self) -> None:
        """Add the squares that had to wait for the end of the backward pass."""
        assert self._pass_examples is not None
        examples, self._pass_examples = self._pass_examples, None
        records = self._deferred
        self._deferred, self._deferred_roots = [], set()
        self.passes.append((self.weight, examples))
        self.weight = None
        if self.keeps:
            self.records = records
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for group in self._connected(records):
                self._add(group, examples)

    def _connected(self, records: list[Record]) -> list[list[Record]]:
        """Sort records into groups that share no weight."""
        groups: list[tuple[set[int], list[Record]]] = []
        for record in records:
            keys = {id(r) for r in self.tracker.roots(record.target)}
            joined = [g for g in groups if g[0] & keys]
            merged = [r for _, members in joined for r in members] + [record]
            groups = [g for g in groups if not g[0] & keys]
            groups.append((keys.union(*(g[0] for g in joined)), merged))
        return [members for _, members in groups]

    def _add(self, records: list[Record], examples: int) -> None:
        """Square the sums, over all uses, of each example's gradients."""
        roots = {id(r): r for record in records for r in self.tracker.roots(record.target)}
        if len(roots) == 1 and all(id(r.target) in roots for r in records):
            joined = type(records[0]).joined(records) if len(records) > 1 else records[0]
            if joined is not None:
                joined.write_to(*self.sink(joined.target))
                return
        totals: dict[int, Tensor] = {}
        for key, root in roots.items():
            totals[key], fresh = self.sink(root)
            if fresh:
                totals[key].zero_()
        pulls = {}
        for record in records:
            derived = self.tracker.derived.get(id(record.target))
            if derived is not None and id(record.target) not in pulls:
                pulls[id(record.target)] = derived.pullback(self.tracker.describe(record.target))
        step = max(1, CHUNK // max(1, sum(t.numel() for t in totals.values())))
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
                _add_squares(gradients, totals[key])
