"""The draws of one prediction: the same on every pass, kept if they fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from torchbayes.core.names import named_buffers
from torchbayes.posterior import Posterior, Weights
from torchbayes.predict.batchnorm import recalibrate_each
from torchbayes.predict.sizes import size_of

__all__ = ["Draws"]

_Source = Callable[[int, torch.Generator], Iterator[Weights]]


class Draws:
    """The same draws on every pass: kept if they fit into memory, otherwise drawn again.

    The buffers of the draw, or else of the model, are copied, so that a module that writes to its buffers
    even in evaluation mode writes to the copies. Weights are the posterior's own where it lends them.
    """

    def __init__(
        self, model: nn.Module, posterior: Posterior, samples: int, generator: torch.Generator,
        device: torch.device, budget: int, loader: Iterable[Any] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._loader = model, loader
        self._statistics: list[Weights] = []
        self._posterior, self._count, self._generator = posterior, samples, generator
        self._device, self._state = device, generator.get_state()
        self._buffers = named_buffers(model)
        self.first = next(self._make(posterior.draws))
        self.cached = size_of(self.first) * samples <= budget
        self._kept: list[Weights] | None = None
        self._lent: bool | None = None

    def _make(self, source: _Source) -> Iterator[Weights]:
        self._generator.set_state(self._state)
        # Unlike a loop, map does not hold a draw while the next one is made.
        return map(self._ready, count(), source(self._count, self._generator))

    def _ready(self, index: int, draw: Weights) -> Weights:
        if self._loader is not None:
            if index == len(self._statistics):
                (new,) = recalibrate_each(self._model, [draw], self._loader)
                self._statistics.append({n: new[n] for n in self._buffers if n in new})
            draw = draw | self._statistics[index]
        buffers = {name: draw.get(name, own).clone() for name, own in self._buffers.items()}
        return {name: tensor.to(self._device) for name, tensor in (draw | buffers).items()}

    def _writes_to_weights(self) -> bool:
        """Whether the model changed the weights of `first`, a copy, while it was measured."""
        lent = next(self._make(partial(self._posterior._lent, reuse=False)))
        return not all(
            torch.equal(tensor, self.first[name])
            for name, tensor in lent.items()
            if name not in self._buffers
        )

    def each(self, *, alone: bool) -> Iterator[Weights]:
        """Iterate over the draws; `alone` if each is finished with before the next one is requested."""
        if self._lent is None:
            self._lent = not (self._posterior._lends_own and self._writes_to_weights())
        source: _Source = self._posterior.draws
        if self._lent:
            # Memory pages new to the process cost more than computing the numbers in them.
            source = partial(self._posterior._lent, reuse=alone and not self.cached)
        if not self.cached:
            return self._make(source)
        if self._kept is None:
            self._kept = list(self._make(source))
        return iter(self._kept)
