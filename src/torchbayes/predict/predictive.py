"""Predictions that average over the posterior."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchbayes.core.arrays import as_inputs, as_tensors
from torchbayes.core.batch import (
    arguments,
    batch_len,
    map_tensors,
    network_dtype,
    slice_batch,
    split_batch,
    suited,
    uncompiled,
)
from torchbayes.core.names import named_buffers
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.likelihood import Categorical, Likelihood, as_likelihood
from torchbayes.posterior import Posterior, Weights
from torchbayes.posterior.posterior import plain_network
from torchbayes.predict.batchnorm import (
    check_recalibratable,
    check_repeatable,
    recalibrate_each,
    shared_statistics,
)
from torchbayes.predict.results import Predictive

__all__ = ["predictive"]

# A forward pass is split into pieces of about this much activation memory. Larger pieces leave the cache
# and make the allocator map fresh pages for every layer: on the build machine 1,000 images through
# LeNet-5 take 1.3 × the time of the same images in pieces (benchmarks/steps.py --predict).
_CPU_PIECE = 8 << 20
# But every piece reads all weights, and a matrix product rearranges them first. So the activations that
# pass through a piece should be several times the weights: 784-1200-1200-10 takes 1,000 inputs at once.
_PER_WEIGHT = 4
# Draws run together through vmap where a single draw's pass is so small that Python dominates: few
# activations, and few weights too, because the draws must be copied side by side. With 500 kB of weights
# and one example vmap takes 2.7 × the loop's time, with 12 MB 10 ×, with 35 kB a tenth of it.
_VMAP_BYTES = 1 << 18
_VMAP_WEIGHTS = 1 << 18

_Source = Callable[[int, torch.Generator], Iterator[Weights]]


def predictive(
    model: nn.Module, posterior: Posterior, inputs: Any, samples: int = 32,
    likelihood: Likelihood | None = None, generator: torch.Generator | None = None,
    max_memory: int = 1 << 30, *, output: Output = None, split: bool = True,
    recalibrate: Iterable[Any] | Literal[False] | None = None,
) -> Predictive:  # fmt: skip
    """Predict by averaging over the weights: p(y | x) ≈ mean over draws of p(y | x, w).

    Probabilities are averaged, not logits. All examples are predicted by the same draws. The model runs in
    evaluation mode and is restored afterwards, whatever happens.

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

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 3)
        >>> q = tb.Gaussian(tb.snapshot(model), {"weight": torch.full((3, 2), 0.5)})
        >>> p = tb.predictive(model, q, torch.randn(5, 2), samples=8)
        >>> p.probs.shape, p.epistemic.shape
        (torch.Size([5, 3]), torch.Size([5]))
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}: expected at least 1 draw")
    model = plain_network(model)
    posterior.check(model)
    likelihood = Categorical() if likelihood is None else as_likelihood(likelihood)
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if recalibrate is not None and recalibrate is not False:
        check_repeatable(recalibrate)
        check_recalibratable(posterior)
    runner = _Runner(model, posterior, likelihood, device, max_memory, output, split)
    inputs = as_inputs(inputs)
    parts: list[Predictive] = []
    with _evaluating(model), torch.no_grad(), uncompiled():
        budget = max_memory // 2 if _is_loader(inputs) else 0
        draws = _Draws(model, posterior, samples, generator, device, budget, recalibrate or None)
        if recalibrate is None:
            _warn_of_shared_statistics(model, posterior, draws.first)
        for block in _blocks(inputs, max_memory // 4, draws.cached):
            parts.extend(runner.run(block, draws))
    if not parts:
        raise ValueError("there is nothing to predict: the inputs have no examples")
    return type(parts[0]).cat(parts)


_warned: WeakSet[nn.Module] = WeakSet()


def _warn_of_shared_statistics(model: nn.Module, posterior: Posterior, draw: Weights) -> None:
    """Warn, once for a model, if draws that differ use one set of batch-norm statistics."""
    if model in _warned:
        return
    norm = shared_statistics(model, posterior, draw)
    if norm is not None:
        _warned.add(model)
        warnings.warn(
            f"all draws of this {type(posterior).__name__} use the same statistics of batch norm {norm!r}, "
            "which do not belong to their weights: pass recalibrate=batches of training data to give each "
            "draw its own, or recalibrate=False to keep them",
            stacklevel=3,
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [
        (module, module.training, dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    try:
        model.eval()
        yield
    finally:
        for module, mode, parameters, buffers in before:
            module.training = mode
            # functional_call leaves the draw in a module that occurs twice in the model.
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _is_loader(inputs: Any) -> bool:
    return not isinstance(inputs, (Tensor, tuple, Mapping)) and isinstance(inputs, Iterable)


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _blocks(inputs: Any, budget: int, cached: bool) -> Iterator[list[Any]]:
    """Yield lists of batches to read from a loader before each pass over the draws.

    If the draws are not kept, larger blocks mean that they are drawn fewer times.
    """
    if not _is_loader(inputs):
        yield [inputs]
        return
    block: list[Any] = []
    size = 0
    for batch in inputs:
        block.append(as_tensors(split_batch(batch)[0]))
        size += _bytes(block[-1])
        if cached or size >= budget:
            yield block
            block, size = [], 0
    if block:
        yield block


class _Draws:
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
        self.cached = _bytes(self.first) * samples <= budget
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


class _Runner:
    """Run draws over batches, in pieces that fit, several draws at a time where that is faster."""

    def __init__(
        self, model: nn.Module, posterior: Posterior, likelihood: Likelihood, device: torch.device,
        max_memory: int, output: Output, split: bool,
    ) -> None:  # fmt: skip
        self._split = split
        self._model, self._posterior, self._likelihood = model, posterior, likelihood
        self._device, self._max_memory, self._output = device, max_memory, output
        self._dtype = network_dtype(model)
        self._per_example: dict[Any, tuple[int, int]] = {}
        self._can_vmap = posterior.vmappable
        self._read = _bytes(list(model.parameters()))  # by every pass, held by the posterior or not

    def run(self, block: list[Any], draws: _Draws) -> list[Predictive]:
        weights = max(1, _bytes(draws.first))
        pieces: list[Any] = []
        largest = 1
        for batch in block:
            if not self._split:
                # Shows whether the model writes to its weights.
                self._call(draws.first, suited(batch, self._device, self._dtype))
                pieces.append(batch)
                continue
            length = batch_len(batch)
            if length == 0:
                continue
            per_example, passing = self._measure(draws.first, batch)
            most = self._max_memory // 4 // per_example
            if self._device.type == "cpu":
                most = min(
                    most, max(_CPU_PIECE // per_example, _PER_WEIGHT * self._read // passing)
                )
            # All of one size, so that the last one does not have only a few examples.
            step = -(-length // -(-length // max(1, most)))
            pieces += [slice_batch(batch, i, i + step) for i in range(0, length, step)]
            largest = max(largest, min(step, length) * per_example)
        if not pieces:
            return []
        together = min(64, _VMAP_BYTES // largest, self._max_memory // (8 * weights))
        if together < 2 or weights > _VMAP_WEIGHTS or not self._split:
            together = 1
        results: list[Predictive | None] = [None] * len(pieces)
        for group in _grouped(draws.each(alone=together == 1), together):
            stacked = self._stack(group)
            for index, piece in enumerate(pieces):
                new = self._likelihood.predictive(self._outputs(group, stacked, piece))
                old = results[index]
                results[index] = new if old is None else old.merge(new)
            group.clear()  # before the next draws are made
            del stacked
        return [result for result in results if result is not None]

    def _stack(self, group: list[Weights]) -> Weights | None:
        if len(group) == 1 or not self._can_vmap:
            return None
        return {name: torch.stack([draw[name] for draw in group]) for name in group[0]}

    def _outputs(self, group: list[Weights], stacked: Weights | None, piece: Any) -> Tensor:
        inputs = suited(piece, self._device, self._dtype)
        length = batch_len(piece) if self._split else None

        def call(draw: Weights) -> Tensor:
            return self._checked(self._call(draw, inputs), length)

        if stacked is not None and self._can_vmap:
            try:
                with warnings.catch_warnings():
                    # vmap loops over an operation without a batching rule, more slowly than our loop.
                    warnings.filterwarnings("error", message="There is a performance drop")
                    return torch.func.vmap(call)(stacked)
            except Exception:
                # Or rejects it. If the loop fails too, its error is the one to show.
                self._can_vmap = False
        return torch.stack([call(draw) for draw in group])

    def _call(self, draw: Weights, inputs: Any) -> Any:
        args, kwargs = arguments(inputs)
        return self._posterior.call(self._model, draw, *args, **kwargs)

    def _checked(self, returned: Any, length: int | None) -> Tensor:
        outputs = output_tensor(returned, self._output, network=type(self._model).__name__)
        if length is not None and outputs.shape[:1] != (length,):
            raise ValueError(
                f"{type(self._model).__name__} returns shape {tuple(outputs.shape)} for {length} examples: "
                "the first dimension of inputs and outputs must be the batch dimension; pass split=False for "
                "inputs that are to be passed whole, such as a graph"
            )
        return outputs

    def _measure(self, draw: Weights, batch: Any) -> tuple[int, int]:
        """Estimate the peak and the total bytes that one example takes in a forward pass.

        The estimate is what two examples take more than one, because weights that the forward pass
        transposes or computes (weight norm) do not grow with the batch.
        """
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        key = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        if key not in self._per_example:
            one = suited(slice_batch(batch, 0, 1), self._device, self._dtype)
            two = map_tensors(one, lambda t: torch.cat([t, t]) if t.dim() else t)
            sizes = []
            for inputs in (one, two):
                with _OperationSizes() as operations:
                    try:
                        self._call(draw, inputs)
                    except RuntimeError as error:
                        raise RuntimeError(
                            f"{type(self._model).__name__} cannot take the first example of these inputs "
                            f"alone ({str(error).splitlines()[0]}): check their shape, or pass split=False "
                            "if they cannot be cut along the first dimension, such as a graph"
                        ) from error
                sizes.append(operations.bytes)
            if len(sizes[0]) == len(sizes[1]):
                growth = [more - less for less, more in zip(*sizes, strict=True)]
            else:
                growth = [size // 2 for size in sizes[1]]
            self._per_example[key] = max(1, 2 * max(growth, default=1)), max(1, sum(growth))
        return self._per_example[key]


class _OperationSizes(TorchDispatchMode):
    """Record how much memory the result of every operation takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skipping Dynamo would first import it, which takes longer than most predictions.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes.append(_bytes(result))
        return result


def _grouped(draws: Iterable[Weights], size: int) -> Iterator[list[Weights]]:
    group: list[Weights] = []
    for draw in draws:
        group.append(draw)
        del draw  # the group alone holds it
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
