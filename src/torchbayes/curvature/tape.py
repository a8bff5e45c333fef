"""Gradients of single examples for several backward passes through one forward pass.

A generalised Gauss–Newton matrix Jᵀ H J needs a backward pass for every column of a root of H, and the
variance of an output one for every output. A `Tape` watches one forward pass as `Capture` does; each backward
pass then goes to the outputs of the layers alone, so that no gradient of a weight is computed, and gives for
every weight a record of its examples' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from torchbayes.curvature.accumulate import Record, Uses
from torchbayes.curvature.capture import Capture, Tracker

__all__ = ["Tape"]


class _SummedRecord(Record):
    """Several uses of a weight, or uses through derived tensors, whose gradients are summed per example."""

    def __init__(self, target: Tensor, records: Sequence[Record], tracker: Tracker) -> None:
        super().__init__(target, records[0].examples)
        self.records = records
        self.pulls: dict[int, Callable[[Tensor], list[tuple[Tensor, Tensor]]]] = {}
        for record in records:
            derived = tracker.derived.get(id(record.target))
            if derived is not None and id(record.target) not in self.pulls:
                name = tracker.describe(record.target)
                self.pulls[id(record.target)] = derived.pullback(name)

    def per_example(self, start: int, stop: int) -> Tensor:
        """Return the sum of the uses' gradients."""
        total: Tensor | None = None
        for record in self.records:
            gradients = record.per_example(start, stop)
            pull = self.pulls.get(id(record.target))
            pieces = [(record.target, gradients)] if pull is None else pull(gradients)
            for root, piece in pieces:
                if root is self.target:
                    total = piece.clone() if total is None else total.add_(piece)
        assert total is not None
        return total


class Tape(Capture):
    """Records of a model's weights for any number of backward passes through one forward pass.

    Args:
        model: The network, as for `Capture`.
        parameters: The weights to watch, by name.

    Example:
        >>> import torch
        >>> from torchbayes.curvature import Tape
        >>> net = torch.nn.Linear(2, 3)
        >>> tape = Tape(net, dict(net.named_parameters()))
        >>> with tape.block():
        ...     outputs = net(torch.ones(5, 2))
        ...     records = tape.backward(outputs, torch.eye(3)[0].expand(5, 3))
        >>> records["weight"].per_example(0, 5).shape, net.weight.grad
        (torch.Size([5, 3, 2]), None)
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(model, parameters)
        self.uses = Uses(self.tracker, keeps=True)
        self._found: tuple[int, list[GradientEdge]] | None = None

    def restart(self) -> None:
        """Forget the last forward pass."""
        super().restart()
        self._found = None

    def backward(self, outputs: Tensor, column: Tensor) -> dict[str, Record]:
        """Differentiate Σ column · outputs; return a record for every weight that takes part, by name.

        Args:
            outputs: Outputs of the model, computed inside the block.
            column: Gradient of the outputs.
        """
        self._run(outputs, column)
        return self._by_name()

    def stream(
        self, outputs: Tensor, column: Tensor, receive: Callable[[str, Record], None]
    ) -> None:
        """Like `backward`, but hand over the record of a weight that is used once when it is there.

        Args:
            outputs: Outputs of the model, computed inside the block.
            column: Gradient of the outputs.
            receive: Called with a weight's name and its record.
        """
        names = self.tracker.names
        self.uses.receiver = lambda record: receive(names[id(record.target)], record)
        try:
            self._run(outputs, column)
        finally:
            self.uses.receiver = None
        for name, record in self._by_name().items():
            receive(name, record)

    def _run(self, outputs: Tensor, column: Tensor) -> None:
        self.uses.records = []
        edges = self._ends()
        if edges:
            with torch._C.DisableTorchFunction():
                torch.autograd.grad(outputs, edges, column, retain_graph=True, allow_unused=True)

    def _ends(self) -> list[GradientEdge]:
        """Return the edges that no other one lies behind: the way to them leads through all others.

        The gradients at these edges are results of the pass and stay in memory until its end.
        """
        if self._found is not None and self._found[0] == len(self.uses.edges):
            return self._found[1]
        wanted = {edge.node for edge in self.uses.edges}
        leads: dict[Any, bool] = {}  # whether the way from a node, beyond it, leads to a wanted one
        for start in wanted:
            stack = [(start, False)]
            while stack:
                node, seen = stack.pop()
                after = [n for n, _ in node.next_functions if n is not None]
                if seen:
                    leads[node] = any(n in wanted or leads[n] for n in after)
                elif node not in leads:
                    leads[node] = False
                    stack.append((node, True))
                    stack.extend((n, False) for n in after if n not in leads)
        ends = [edge for edge in self.uses.edges if not leads[edge.node]]
        self._found = len(self.uses.edges), ends
        return ends

    def _by_name(self) -> dict[str, Record]:
        by_weight: dict[int, list[Record]] = {}
        for record in self.uses.records:
            for root in self.tracker.roots(record.target):
                by_weight.setdefault(id(root), []).append(record)
        self.uses.records = []
        return {
            self.tracker.names[key]: self._merged(self.tracker.weights[key], records)
            for key, records in by_weight.items()
        }

    def _merged(self, weight: Tensor, records: list[Record]) -> Record:
        if all(record.target is weight for record in records):
            joined = type(records[0]).joined(records) if len(records) > 1 else records[0]
            if joined is not None:
                return joined
        with torch._C.DisableTorchFunction():
            return _SummedRecord(weight, records, self.tracker)
