"""A posterior for production: drawn once, the same answer to the same input, safe to share."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from torchbayes.core.arrays import as_inputs, as_tensors
from torchbayes.core.batch import device_of, split_batch
from torchbayes.core.outputs import Output
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Posterior, Weights
from torchbayes.posterior.posterior import plain_network
from torchbayes.predict.draws import Draws
from torchbayes.predict.passes import STACKED, Measured, Passes, stack
from torchbayes.predict.predictive import (
    checked,
    evaluation,
    is_loader,
    own_generator,
    warn_of_shared,
)
from torchbayes.predict.results import Predictive
from torchbayes.predict.swapped import SwappedNetwork

__all__ = ["Predictor"]


class Predictor:
    """Predicts with draws that are made once, for a service that answers one request after another.

    The same input gets the same answer, as long as it comes alone or in the same batch. Threads may share a
    predictor, a forked process may go on using it, and it can be pickled if the network can. It holds the
    drawn weights; those that no draw changes, such as a frozen body's, stay in the memory of the network,
    which must not be trained further.

    Args:
        model: The network, or the wrapper that it was trained in; it is not changed.
        posterior: The posterior to draw from.
        samples: Number of draws. A finite posterior, such as an ensemble, gives each member once.
        likelihood: Meaning of the outputs; class logits if None.
        generator: Source of the draws; torch's global one if None.
        max_memory: Approximate limit in bytes on the activations of a pass.
        output: Where the likelihood's tensor is in what the model returns, as for `torchbayes.predictive`.
        split: Whether inputs may be cut into pieces along their first dimension.
        recalibrate: Batches of training data on which each draw gets batch-norm statistics of its own; False
            keeps those that draws share, without a warning.

    Attributes:
        likelihood: Meaning of the outputs.
        output: Where the likelihood's tensor is in what the network returns.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 3)
        >>> q = tb.Gaussian(tb.snapshot(model), {"weight": torch.full((3, 2), 0.5)})
        >>> serve = tb.Predictor(model, q, samples=8)
        >>> serve
        Predictor(8 draws of Linear, 6 of 9 weights vary, Categorical)
        >>> x = torch.randn(1, 2)
        >>> bool((serve(x).probs == serve(x).probs).all())
        True
    """

    def __init__(
        self, model: nn.Module, posterior: Posterior, samples: int = 32,
        likelihood: Likelihood | None = None, generator: torch.Generator | None = None,
        max_memory: int = 1 << 30, *, output: Output = None, split: bool = True,
        recalibrate: Iterable[Any] | Literal[False] | None = None,
    ) -> None:  # fmt: skip
        model = plain_network(model)
        self.likelihood = checked(model, posterior, samples, likelihood, recalibrate)
        self.output, self._split, self._max_memory = output, split, max_memory
        device = device_of(model)
        with evaluation(), own_generator(generator) as source:
            self._network = SwappedNetwork(model, posterior)
            every = recalibrate or None
            draws = Draws(self._network, posterior, samples, source, device, math.inf, every)
            if recalibrate is None:
                warn_of_shared(model, posterior, draws.first)
            self._draws = list(draws.each(alone=False))
            self.samples, self._constant = len(self._draws), draws.constant
            self._stacked: Weights | None = None
            # Nothing to stack if no weight varies, as in a single network.
            if posterior.vmappable and 0 < draws.size * self.samples <= STACKED:
                self._stacked = stack(self._draws)
                self._draws = _rows(self._stacked)
        # What the network itself writes to while it runs, of which every pass then gets a copy.
        self._written: list[str] | None = None
        self._measured: dict[Any, Measured] = {}
        self._free: deque[Passes] = deque()
        self._model = weakref.ref(model)

    def __call__(self, inputs: Any) -> Predictive:
        """Predict.

        Args:
            inputs: As for `torchbayes.predictive`: what the network takes, or a loader.
        """
        inputs = as_inputs(inputs)
        batches = (as_tensors(split_batch(b)[0]) for b in inputs) if is_loader(inputs) else [inputs]
        parts: list[Predictive] = []
        with evaluation():
            passes = self._take()
            try:
                for batch in batches:
                    parts += self._predict(passes, batch)
            finally:
                self._free.append(passes)
        if not parts:
            raise ValueError("there is nothing to predict: the inputs have no examples")
        return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts)

    def _take(self) -> Passes:
        """Return passes through a copy of the network that no other thread uses now."""
        try:
            return self._free.pop()
        except IndexError:
            network = SwappedNetwork(self._network.twin, self._network.posterior)
            model = self._model() if self._model is not None else None
            return Passes(
                self._network.twin if model is None else model, network, self._stacked is not None,
                device_of(network.twin), self._max_memory, self.output, self._split, self._measured,
            )  # fmt: skip

    def _predict(self, passes: Passes, batch: Any) -> list[Predictive]:
        trial = self._trial()
        pieces, size = passes.pieces(trial, batch)
        if not pieces:
            return []
        if self._written is None:
            own = self._own(self._draws[0])
            self._written = [name for name in own if not torch.equal(own[name], trial[name])]
        draws, stacked = self._draws, self._stacked
        if self._written:
            draws, stacked = [self._fresh(draw) for draw in draws], None
        else:
            passes.share(draws, self._constant, pieces[0])
        return passes.predict(draws, stacked, pieces, size, self.likelihood)

    def _own(self, draw: Weights) -> Weights:
        """Return a draw with all weights and buffers that the network has besides."""
        return {name: self._network.own(name) for name in self._network.names} | draw

    def _trial(self) -> Weights:
        """Return a draw that the network may write to."""
        if self._written is None:
            return {name: tensor.clone() for name, tensor in self._own(self._draws[0]).items()}
        return self._fresh(self._draws[0])

    def _fresh(self, draw: Weights) -> Weights:
        if not self._written:
            return draw
        own = self._own(draw)
        return draw | {name: own[name].clone() for name in self._written}

    @property
    def networks(self) -> list[nn.Module]:
        """A network in evaluation mode for every draw, with its weights: as they are, to export them.

        Raises:
            ValueError: If draws are more than weights, as masks of dropout are.
        """
        if self._network.posterior is not None:
            raise ValueError(
                f"the draws of a {type(self._network.posterior).__name__} are no weights that networks of "
                "their own could have: export the network with the posterior's mean"
            )
        result: list[nn.Module] = []
        for draw in self._draws:
            network = SwappedNetwork(self._network.twin)
            network.fix(draw)
            result.append(network.twin)
        return result

    def __getstate__(self) -> dict[str, Any]:
        # Views of the stacked weights would each be written as a whole.
        draws = None if self._stacked is not None else self._draws
        return self.__dict__ | {"_draws": draws, "_free": None, "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._free = deque()
        if self._stacked is not None:
            self._draws = _rows(self._stacked)

    def __repr__(self) -> str:
        network = self._network
        weights = {n for n in network.names if isinstance(network.own(n), nn.Parameter)}
        total, varying = (
            sum(network.own(name).numel() for name in weights & names)
            for names in (weights, self._draws[0].keys())
        )
        about = f"{varying:,} of {total:,} weights vary"
        if network.posterior is not None:
            about = f"of a {type(network.posterior).__name__}"
        return (
            f"Predictor({self.samples} draws of {type(network.twin).__name__}, {about}, "
            f"{type(self.likelihood).__name__})"
        )


def _rows(stacked: Weights) -> list[Weights]:
    """Return draws as views of the stacked ones."""
    rows = zip(*(tensor.unbind() for tensor in stacked.values()), strict=True)
    return [dict(zip(stacked, row, strict=True)) for row in rows]
