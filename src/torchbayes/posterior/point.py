"""One set of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchbayes.posterior.posterior import StoredPosterior, Weights, lent

__all__ = ["Point"]


class Point(StoredPosterior):
    """All mass on one set of weights: the result of ordinary training.

    Args:
        weights: The weights, and buffers if the draw has its own.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> point = tb.Point(tb.snapshot(model))
        >>> bool((point.sample()["weight"] == model.weight).all())
        True
    """

    kind = "point"
    shares_statistics = False
    _lends_own = True

    def __init__(self, weights: Weights, *, model_name: str = "", rest: str = "") -> None:
        super().__init__(weights, model_name, rest)

    def _random(self) -> Iterable[str]:
        return ()

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Return the weights: a point has no spread."""
        return self.mean()

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """Yield the weights once."""
        if count > 0:
            yield self.mean()

    def _lent(
        self, count: int, generator: torch.Generator | None, *, reuse: bool
    ) -> Iterator[Weights]:
        if type(self) is not Point:  # a subclass may draw differently
            return self.draws(count, generator)
        return iter([lent(self._mean)] if count > 0 else [])

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Point:
        return cls(groups["mean"])
