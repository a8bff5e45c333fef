"""The draws of one prediction: the same on every pass, kept if they fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.device import generator_state
from torchbayes.core.names import named_buffers
from torchbayes.posterior import Posterior, Weights
from torchbayes.predict.batchnorm import recalibrate_each
from torchbayes.predict.sizes import size_of
from torchbayes.predict.swapped import SwappedNetwork

__all__ = ["Draws"]

_Source = Callable[[int, torch.Generator], Iterator[Weights]]


class Draws:
    """The same draws on every pass: kept if they fit into memory, otherwise drawn again.

    `first`, with which the network is measured, is a whole copy. It shows what the network itself writes to.
    If that is no weight, the weights that no draw changes are put into the network once, the others are the
    posterior's own where it lends them, and only buffers that are written to are copied for every draw.

    Args:
        network: The network that will run.
        posterior: The posterior to draw from.
        samples: Number of draws.
        generator: Source of the draws.
        device: Device of the network.
        budget: Bytes up to which draws are kept.
        loader: Data for batch-norm statistics of each draw, or None.

    Attributes:
        first: The first draw.
        size: Bytes of a draw, without what is the same in all draws.
        cached: Whether the draws are kept.
        constant: Names of the weights that are the same in all draws, once `each` has been called.
    """

    def __init__(
        self, network: SwappedNetwork, posterior: Posterior, samples: int, generator: torch.Generator,
        device: torch.device, budget: float, loader: Iterable[Any] | None = None,
    ) -> None:  # fmt: skip
        self._network, self._loader = network, loader
        self._statistics: list[Weights] = []
        self._posterior, self._count, self._generator = posterior, samples, generator
        self._device, self._state = device, generator_state(generator)
        self._buffers = named_buffers(network.twin)
        self._copied = set(self._buffers)
        varying, fixed = posterior._trimmed()
        self._varying = varying
        self._fixed = {name: tensor.to(device) for name, tensor in fixed.items()}
        self._names: set[str] = set()
        self.first = next(self._make(posterior.draws))
        self._names -= fixed.keys()
        self.size = size_of([t for name, t in self.first.items() if name not in fixed])
        self.cached = self.size * samples <= budget
        self._kept: list[Weights] | None = None
        self._lent: bool | None = None
        self.constant: set[str] = set()

    def _make(self, source: _Source) -> Iterator[Weights]:
        self._generator.set_state(self._state)
        # Unlike a loop, map does not hold a draw while the next one is made.
        return map(self._ready, count(), source(self._count, self._generator))

    def _ready(self, index: int, draw: Weights) -> Weights:
        if not self._names:
            self._names = set(draw)
        if self._loader is not None:
            if index == len(self._statistics):
                whole = self._fixed | draw
                (new,) = recalibrate_each(self._network.twin, [whole], self._loader)
                self._statistics.append({n: new[n] for n in self._buffers if n in new})
            draw = draw | self._statistics[index]
        own = self._buffers | self._fixed
        copies = {name: draw.get(name, own[name]).clone() for name in self._copied}
        return {name: tensor.to(self._device) for name, tensor in (draw | copies).items()}

    def _settle(self) -> None:
        """Look at what the network has written to while it was measured with the first draw."""
        lent: Weights = dict(self._fixed)
        if self._posterior._lends_own:
            lent |= next(self._make(partial(self._posterior._lent, reuse=False)))
        weights = [name for name in lent if name not in self._buffers]
        self._lent = all(_same(lent[name], self.first[name]) for name in weights)
        # A posterior that runs the network in its own way may count on whole draws.
        if not self._lent or (self._network.posterior is not None and not self._fixed):
            return
        statistics = self._statistics[0] if self._statistics else {}
        own = self._buffers | self._fixed | statistics
        self._copied = {
            name
            for name in self._buffers
            if (name in self._names and name not in statistics)
            or not _same(own[name], self.first[name])
        }
        self._network.fix(self._fixed)
        self._posterior = self._varying
        varying = self._names | statistics.keys() | self._copied
        self.constant = set(self._network.names) - varying

    def shareable(self, limit: int) -> bool:
        """Whether a weight is the same in all draws, and the draws take at most `limit` bytes."""
        if self._lent is None:
            self._settle()
        return bool(self.constant - self._buffers.keys()) and self.size * self._count <= limit

    def all(self) -> list[Weights]:
        """Return all draws, which are kept from now on."""
        self.cached = True
        return list(self.each(alone=False))

    def each(self, *, alone: bool) -> Iterator[Weights]:
        """Iterate over the draws; `alone` if each is finished with before the next one is requested."""
        if self._lent is None:
            self._settle()
        source: _Source = self._posterior.draws
        if self._lent:
            # Memory pages new to the process cost more than computing the numbers in them.
            source = partial(self._posterior._lent, reuse=alone and not self.cached)
        if not self.cached:
            return self._make(source)
        if self._kept is None:
            self._kept = list(self._make(source))
        return iter(self._kept)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.to(other.device), other)
