"""Predictions that average over the posterior."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torchbayes.core.arrays import as_inputs, as_tensors
from torchbayes.core.batch import device_of, split_batch, uncompiled
from torchbayes.core.device import generator_state
from torchbayes.core.outputs import Output
from torchbayes.likelihood import Categorical, Likelihood, as_likelihood
from torchbayes.posterior import Posterior, Weights
from torchbayes.posterior.posterior import plain_network
from torchbayes.predict.batchnorm import check_recalibratable, check_repeatable, shared_statistics
from torchbayes.predict.draws import Draws
from torchbayes.predict.local import LocalDraws
from torchbayes.predict.passes import Passes, average_over
from torchbayes.predict.results import Predictive
from torchbayes.predict.sizes import size_of
from torchbayes.predict.swapped import SwappedNetwork

__all__ = ["checked", "evaluation", "is_loader", "own_generator", "predictive", "warn_of_shared"]


def predictive(
    model: nn.Module, posterior: Posterior, inputs: Any, samples: int = 32,
    likelihood: Likelihood | None = None, generator: torch.Generator | None = None,
    max_memory: int = 1 << 30, *, output: Output = None, split: bool = True,
    recalibrate: Iterable[Any] | Literal[False] | None = None, local: bool = False,
) -> Predictive:  # fmt: skip
    """Predict by averaging over the weights: p(y | x) ≈ mean over draws of p(y | x, w).

    Probabilities are averaged, not logits. All examples are predicted by the same draws. What runs is a copy
    of the model in evaluation mode that shares the memory of its weights: the model itself is never changed,
    and threads may share it.

    Args:
        model: The network, or the wrapper that it was trained in.
        posterior: The posterior to draw from.
        inputs: A tensor, array or data frame, a tuple (the model's positional arguments) or a dictionary (its
            keyword arguments; `labels` are left out) of them; a loader, that is an iterable of batches, each
            of them inputs or a pair of inputs and targets; or a torch data set.
        samples: Number of draws. A finite posterior, such as an ensemble, gives each member once.
        likelihood: Meaning of the outputs; class logits if None.
        generator: Source of the draws; torch's global one if None.
        max_memory: Approximate limit in bytes on draws and activations held at a time.
        output: Where the likelihood's tensor is in what the model returns: a key, an index or a function. A
            tensor, and what is called `logits`, is found without it.
        split: Whether inputs may be cut into pieces along their first dimension. False passes them whole,
            such as the nodes and edges of a graph; the model's outputs then need not have as many rows as
            its inputs, and `max_memory` limits the draws alone.
        recalibrate: Batches of training data on which each draw gets batch-norm statistics of its own, at the
            cost of a pass over them per draw; see `recalibrate_batchnorm`. Without it, draws that share one
            set of statistics cause a warning; False keeps them without one.
        local: Whether every example draws the outputs of linear and convolution layers in place of their
            weights where that is less work (local reparameterisation), which needs a `Gaussian`. For a chain
            of linear layers each example's prediction has the same distribution as with weight draws, but
            draws say nothing about several examples together; the positions of a convolution's or a
            sequence's outputs are independent, which is an approximation. `torchbayes.predict.local` says
            exactly what holds.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 3)
        >>> q = tb.Gaussian(tb.snapshot(model), {"weight": torch.full((3, 2), 0.5)})
        >>> p = tb.predictive(model, q, torch.randn(5, 2), samples=8)
        >>> p.probs.shape, p.epistemic.shape
        (torch.Size([5, 3]), torch.Size([5]))
    """
    model = plain_network(model)
    likelihood = checked(model, posterior, samples, likelihood, recalibrate)
    device = device_of(model)
    inputs = as_inputs(inputs)
    parts: list[Predictive] = []
    with evaluation(), own_generator(generator) as source:
        network = SwappedNetwork(model, posterior)
        if local:
            if recalibrate is not None and recalibrate is not False:
                raise ValueError(
                    "recalibrate and local=True were both given: without draws of the weights there is "
                    "nothing that batch-norm statistics could belong to, so leave one of them out"
                )
            own = LocalDraws(network, posterior, samples, source, device)
            if recalibrate is None:
                warn_of_shared(model, posterior, own.shifted(), local=True)
            passes = Passes(model, network, False, device, max_memory // 2, output, split)
            for block in _blocks(inputs, max_memory // 4, True):
                for batch in block:
                    parts.extend(own.predict(batch, passes, likelihood, max_memory))
            return _joined(parts)
        passes = Passes(model, network, posterior.vmappable, device, max_memory, output, split)
        budget = max_memory // 2 if is_loader(inputs) else 0
        draws = Draws(network, posterior, samples, source, device, budget, recalibrate or None)
        if recalibrate is None:
            warn_of_shared(model, posterior, draws.first)
        for block in _blocks(inputs, max_memory // 4, draws.cached):
            parts.extend(average_over(draws, block, passes, likelihood, max_memory))
    return _joined(parts)


def _joined(parts: list[Predictive]) -> Predictive:
    if not parts:
        raise ValueError("there is nothing to predict: the inputs have no examples")
    return type(parts[0]).cat(parts)


@contextmanager
def evaluation() -> Iterator[None]:
    """Run networks inside the block as they are written, without gradients and out of inference mode."""
    with torch.inference_mode(False), torch.no_grad(), uncompiled():
        yield


def checked(
    model: nn.Module, posterior: Posterior, samples: int, likelihood: Likelihood | None,
    recalibrate: Iterable[Any] | Literal[False] | None,
) -> Likelihood:  # fmt: skip
    """Check the arguments of a prediction; return the likelihood."""
    if samples < 1:
        raise ValueError(f"samples is {samples}: expected at least 1 draw")
    posterior.check(model)
    if recalibrate is not None and recalibrate is not False:
        check_repeatable(recalibrate)
        check_recalibratable(posterior)
    return Categorical() if likelihood is None else as_likelihood(likelihood)


@contextmanager
def own_generator(generator: torch.Generator | None) -> Iterator[torch.Generator]:
    """Yield a generator in the state of the given one, which in the end takes over the state of this one.

    Draws may be made twice from one state, and another thread may use the given generator in between.
    """
    if generator is None:
        yield torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        return
    own = torch.Generator(generator.device)
    own.set_state(generator_state(generator))
    try:
        yield own
    finally:
        generator.set_state(generator_state(own))


_warned: WeakSet[nn.Module] = WeakSet()


def warn_of_shared(
    model: nn.Module, posterior: Posterior, draw: Weights, stacklevel: int = 3, *, local: bool = False
) -> None:  # fmt: skip
    """Warn, once for a model, if draws that differ use one set of batch-norm statistics."""
    if model in _warned:
        return
    norm = shared_statistics(model, posterior, draw)
    if norm is not None:
        _warned.add(model)
        warnings.warn(
            f"all draws of this {type(posterior).__name__} use the same statistics of batch norm {norm!r}, "
            f"which do not belong to their weights: {'leave out local=True and ' if local else ''}pass "
            "recalibrate=batches of training data to give each draw its own, or recalibrate=False to keep "
            "them",
            stacklevel=stacklevel,
        )


def is_loader(inputs: Any) -> bool:
    """Whether inputs are an iterable of batches."""
    return not isinstance(inputs, (Tensor, tuple, Mapping)) and isinstance(inputs, Iterable)


def _blocks(inputs: Any, budget: int, cached: bool) -> Iterator[list[Any]]:
    """Yield lists of batches to read from a loader before each pass over the draws.

    If the draws are not kept, larger blocks mean that they are drawn fewer times.
    """
    if not is_loader(inputs):
        yield [inputs]
        return
    block: list[Any] = []
    size = 0
    for batch in inputs:
        block.append(as_tensors(split_batch(batch)[0]))
        size += size_of(block[-1])
        if cached or size >= budget:
            yield block
            block, size = [], 0
    if block:
        yield block
