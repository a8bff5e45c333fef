"""One set of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchbayes.posterior.posterior import Posterior, Weights, copied, lent

__all__ = ["Point"]


class Point(Posterior):
    """All mass on one set of weights: what ordinary training gives.

    Args:
        weights: The weights, and buffers if the draw has its own.
        model_name: The class name of the model they are of.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> point = tb.Point(tb.snapshot(model))
        >>> bool((point.sample()["weight"] == model.weight).all())
        True
    """

    kind = "point"
    _lends_own = True

    def __init__(self, weights: Weights, *, model_name: str = "") -> None:
        self._weights = copied(weights)
        self.model_name = model_name

    def mean(self) -> Weights:
        """The weights."""
        return {name: tensor.clone() for name, tensor in self._weights.items()}

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """The weights again: a point has no spread."""
        return self.mean()

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """The weights, once."""
        if count > 0:
            yield self.mean()

    def _lent(
        self, count: int, generator: torch.Generator | None, *, reuse: bool
    ) -> Iterator[Weights]:
        if type(self) is not Point:  # a subclass may draw in another way
            return self.draws(count, generator)
        return iter([lent(self._weights)] if count > 0 else [])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._weights.items()}

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._weights}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Point:
        return cls(groups["mean"])
