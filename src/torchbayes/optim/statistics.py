"""Means over examples that a step needs, and their averages over draws, micro-batches and processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchbayes.core import distributed

__all__ = ["Bank", "Key", "Statistics"]

Key = tuple[str, int]
"""What it is a mean of, and the `id` of the parameter."""

# How often a loss scale is a factor of it: once in gradients, twice in squares, not at all in inputs.
_POWERS = {"gradient": 1, "draw": 0, "product": 1, "square": 2, "inputs": 0, "outputs": 2}


@dataclass
class Statistics:
    """Tensors with a factor each, so that a scaling costs nothing.

    Attributes:
        tensors: The tensors.
        factors: What to multiply them by.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    factors: dict[Key, float] = field(default_factory=dict)

    def put(self, key: Key, tensor: Tensor, factor: float = 1.0) -> None:
        """Add a tensor."""
        self.tensors[key], self.factors[key] = tensor, factor

    def unscale(self, scale: float) -> None:
        """Take out a loss scale."""
        for key in self.factors:
            self.factors[key] /= scale ** _POWERS[key[0]]

    def has(self, kind: str, p: Tensor) -> bool:
        """Whether there is such a statistic of a parameter."""
        return (kind, id(p)) in self.tensors

    def factor(self, kind: str, p: Tensor) -> float:
        """What to multiply the tensor by."""
        return self.factors[(kind, id(p))]

    def value(self, kind: str, p: Tensor) -> Tensor:
        """The tensor times its factor."""
        tensor, factor = self.tensors[(kind, id(p))], self.factor(kind, p)
        return tensor if factor == 1.0 else tensor * factor


class Bank:
    """Sums of statistics over blocks, weighted by examples."""

    def __init__(self) -> None:
        self.sums: dict[Key, Tensor] = {}
        self.examples = 0.0
        self.empty = True

    def clear(self) -> None:
        """Start again."""
        self.sums, self.examples, self.empty = {}, 0.0, True

    def add(self, statistics: Statistics, examples: float) -> None:
        """Add the means of a block with this many examples."""
        for key, tensor in statistics.tensors.items():
            weight = statistics.factors[key] * examples
            if key in self.sums:
                self.sums[key].add_(tensor, alpha=weight)
            else:
                self.sums[key] = tensor * weight
        self.examples += examples
        self.empty = False

    def reduce(self, shapes: Mapping[Key, Tensor]) -> None:
        """Sum over processes, in one message.

        Args:
            shapes: For each statistic a tensor of its shape. A process that has not seen a weight counts
                zeros; a weight that none has seen stays out.
        """
        zeros = {
            key: torch.zeros_like(t, requires_grad=False)
            for key, t in shapes.items()
            if key not in self.sums
        }
        values = [self.sums.get(key, zeros.get(key)) for key in shapes]
        present = [t for t in values if t is not None]
        first = present[0]
        counts = torch.tensor(
            [self.examples, *(float(key in self.sums) for key in shapes)],
            device=first.device,
        )  # fmt: skip
        distributed.sum_packed([counts, *present])
        seen = counts.tolist()
        self.examples, self.empty = seen[0], False
        self.sums = {
            key: t for key, t, used in zip(shapes, present, seen[1:], strict=True) if used > 0
        }

    def mean(self) -> Statistics:
        """The weighted means."""
        result = Statistics()
        for key, tensor in self.sums.items():
            result.put(key, tensor, 1.0 / max(self.examples, 1.0))
        return result
