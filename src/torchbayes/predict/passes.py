"""Forward passes under many draws: in pieces that fit, several draws at a time where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchbayes.core.batch import (
    batch_len,
    map_tensors,
    network_dtype,
    slice_batch,
    suited,
)
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.core.private import LeakWatch
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Weights
from torchbayes.predict.draws import Draws
from torchbayes.predict.results import Predictive
from torchbayes.predict.shared import NotShareableError, Sharing, find_sharing
from torchbayes.predict.sizes import OperationSizes, size_of
from torchbayes.predict.swapped import SwappedNetwork

__all__ = ["STACKED", "Measured", "Passes", "average_over", "stack"]

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
# Draws that are side by side already all run at once if one draw's pass takes at most this much memory. Up
# to here Python and the calls of small operations dominate: LeNet-5 and 32 draws of one image take 0.2 of the
# loop's time, of 4 images (150 kB) 0.6 and of 8 images 0.95.
_TOGETHER = 160 << 10
# Up to this many bytes, draws are put side by side once and for all.
STACKED = 64 << 20


class Measured(NamedTuple):
    """What one more example takes in a forward pass.

    Attributes:
        peak: Bytes at the largest operation, of its inputs and its results.
        passing: Bytes of all operations together.
        batched: Whether vmap has a rule for every operation.
        writes: Whether the network writes to its inputs.
    """

    peak: int
    passing: int
    batched: bool
    writes: bool


class Passes:
    """Runs a network under draws, over pieces of its inputs that fit, together or one after another.

    Args:
        model: The user's network, of which no weight may be read.
        network: The copy that runs.
        vmappable: Whether `torch.func.vmap` may run several draws at once.
        device: The network's device.
        max_memory: Approximate limit in bytes.
        output: Where the likelihood's tensor is in what the network returns.
        split: Whether inputs may be cut into pieces.
        known: What has been measured, which several may share.
    """

    def __init__(
        self, model: nn.Module, network: SwappedNetwork, vmappable: bool, device: torch.device,
        max_memory: int, output: Output, split: bool, known: dict[Any, Measured] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._network, self.split = model, network, split
        self._device, self._max_memory, self._output = device, max_memory, output
        self._name, self._dtype = type(model).__name__, network_dtype(model)
        self._per_example = {} if known is None else known
        self.can_vmap = vmappable and split
        self._read = size_of(list(model.parameters()))  # by every pass, held or not
        self._sharing: Sharing | None = None
        self._tried, self._tail, self._kept = False, 0, 0
        self._writes: bool | None = None  # to its inputs

    def pieces(self, draw: Weights, batch: Any) -> tuple[list[Any], int]:
        """Cut a batch into pieces; return them and the bytes that the largest takes in a pass.

        Args:
            draw: A draw to measure the network with, which it may write to.
            batch: The inputs.
        """
        if not self.split:
            if self._writes is None:
                inputs = _copied(self._suited(batch))
                with LeakWatch(self._model, self._network.twin):
                    self._network(draw, inputs)
                self._writes = _written(inputs)
            return [batch], 1
        length = batch_len(batch)
        if length == 0:
            return [], 1
        per_example, passing, batched, self._writes = self._measure(draw, batch)
        self.can_vmap = self.can_vmap and batched
        most = self._max_memory // 4 // per_example
        if self._device.type == "cpu":
            most = min(most, max(_CPU_PIECE // per_example, _PER_WEIGHT * self._read // passing))
        # All of one size, so that the last one does not have only a few examples.
        step = -(-length // -(-length // max(1, most)))
        parts = [slice_batch(batch, i, i + step) for i in range(0, length, step)]
        return parts, min(step, length) * per_example

    def _suited(self, inputs: Any) -> Any:
        moved = suited(inputs, self._device, self._dtype)
        # Tensors of inference mode do not count what is written to them.
        return map_tensors(moved, lambda t: t.clone() if t.is_inference() else t)

    def outputs(self, group: list[Weights], stacked: Weights | None, piece: Any) -> Tensor:
        """Return the outputs for a piece of the inputs under every draw, (draws, examples, …).

        Args:
            group: The draws.
            stacked: The same draws side by side, to be run at once; None to run one after another.
            piece: The inputs.
        """
        inputs = self._suited(piece)
        length = batch_len(piece) if self.split else None

        def call(draw: Weights) -> Tensor:
            own = _copied(inputs) if self._writes else inputs
            return self._checked(self._network(draw, own), length)

        if self._sharing is not None and not self._writes:
            try:
                return self._shared(self._sharing, call, group, stacked, inputs)
            except Exception:
                self._sharing = None  # if the network itself fails, it will show
        if stacked is not None and self.can_vmap:
            try:
                return torch.func.vmap(call)(stacked)
            except Exception:
                # An operation cannot be batched. If the loop fails too, its error is the one to show.
                self.can_vmap = False
        return torch.stack([call(draw) for draw in group])

    def _shared(
        self, sharing: Sharing, call: Callable[[Weights], Tensor], group: list[Weights],
        stacked: Weights | None, inputs: Any,
    ) -> Tensor:  # fmt: skip
        record = sharing.record(inputs)
        with sharing.using(record):
            outputs = [call(group[0])]
        if stacked is not None and self.can_vmap:
            try:
                with sharing.using(record):
                    return torch.func.vmap(call)(stacked)
            except NotShareableError:
                raise
            except Exception:
                self.can_vmap = False
        for draw in group[1:]:
            with sharing.using(record):
                outputs.append(call(draw))
        return torch.stack(outputs)

    def share(self, draws: Sequence[Weights], constant: Collection[str], piece: Any) -> bool:
        """Find out whether draws can share work that none of them changes; from then on they do.

        Two examples run under two draws, and the second draw's outputs must be those without sharing.

        Args:
            draws: Two draws or more.
            constant: Names of the weights and buffers that are the same in all draws.
            piece: Some inputs.
        """
        if self._tried:
            return self._sharing is not None
        self._tried = True
        parameters = (n for n in constant if isinstance(self._network.own(n), nn.Parameter))
        if self._writes or len(draws) < 2 or not any(parameters):
            return False
        few = slice_batch(piece, 0, 2) if self.split else piece
        found = find_sharing(self._network, draws, constant, self._suited(few), self._output)
        if found is None:
            return False
        self._sharing, tail, kept = found
        examples = batch_len(few) if self.split else 1
        self._tail, self._kept = 2 * tail // examples, kept // examples
        return True

    def _fitting(self, piece: Any) -> list[Any]:
        """Cut a piece so that what is kept for all draws fits."""
        step = max(1, self._max_memory // 4 // max(1, self._kept))
        return [slice_batch(piece, i, i + step) for i in range(0, batch_len(piece), step)]

    def predict(
        self, draws: list[Weights], stacked: Weights | None, pieces: list[Any], size: int,
        likelihood: Likelihood,
    ) -> list[Predictive]:  # fmt: skip
        """Predict pieces of the inputs with draws that are all there.

        Args:
            draws: The draws.
            stacked: The same side by side, or None.
            pieces: The inputs.
            size: What the largest piece takes in a pass, from `pieces`.
            likelihood: Meaning of the outputs.
        """
        if self._sharing is not None and self.split:
            pieces = [part for piece in pieces for part in self._fitting(piece)]
            size = self._tail * max(map(batch_len, pieces))
        count = min(len(draws), max(1, self._max_memory // 4 // max(1, size)))
        if size > _TOGETHER or count < len(draws):
            stacked = None
        parts: list[Predictive] = []
        for piece in pieces:
            merged: Predictive | None = None
            for start in range(0, len(draws), count):
                outputs = self.outputs(draws[start : start + count], stacked, piece)
                new = likelihood.predictive(outputs)
                merged = new if merged is None else merged.merge(new)
            assert merged is not None
            parts.append(merged)
        return parts

    def _checked(self, returned: Any, length: int | None) -> Tensor:
        outputs = output_tensor(returned, self._output, network=self._name)
        if length is not None and outputs.shape[:1] != (length,):
            raise ValueError(
                f"{self._name} returns shape {tuple(outputs.shape)} for {length} examples: "
                "the first dimension of inputs and outputs must be the batch dimension; pass split=False for "
                "inputs that are to be passed whole, such as a graph"
            )
        return outputs

    def _measure(self, draw: Weights, batch: Any) -> Measured:
        """Estimate the peak and the total bytes that one example takes in a forward pass.

        The estimate is what two examples take more than one, because weights that the forward pass
        transposes or computes (weight norm) do not grow with the batch.
        """
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        key = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        if key not in self._per_example:
            one = _copied(self._suited(slice_batch(batch, 0, 1)))
            two = map_tensors(one, lambda t: torch.cat([t, t]) if t.dim() else t)
            sizes, batched, writes = [], True, False
            for inputs in (one, two):
                with OperationSizes(self._model, self._network.twin) as operations:
                    try:
                        self._network(draw, inputs)
                    except RuntimeError as error:
                        raise RuntimeError(
                            f"{self._name} cannot take the first example of these inputs "
                            f"alone ({str(error).splitlines()[0]}): check their shape, or pass split=False "
                            "if they cannot be cut along the first dimension, such as a graph"
                        ) from error
                sizes.append(operations.bytes)
                batched = batched and operations.batched
                writes = writes or _written(inputs)
            if len(sizes[0]) == len(sizes[1]):
                growth = [more - less for less, more in zip(*sizes, strict=True)]
            else:
                growth = [size // 2 for size in sizes[1]]
            self._per_example[key] = Measured(
                max(1, 2 * max(growth, default=1)), max(1, sum(growth)), batched, writes
            )
        return self._per_example[key]


def _copied(inputs: Any) -> Any:
    return map_tensors(inputs, torch.clone)


def _written(copies: Any) -> bool:
    """Whether copies of inputs have been written to."""
    return any(t._version for t in tree_leaves(copies) if isinstance(t, Tensor))


def average_over(
    draws: Draws, block: list[Any], passes: Passes, likelihood: Likelihood, max_memory: int
) -> list[Predictive]:
    """Predict several batches, averaged over draws that are made one after another.

    Args:
        draws: The draws.
        block: The batches, which are all run before the next draws are made.
        passes: Runs them.
        likelihood: Meaning of the outputs.
        max_memory: Approximate limit in bytes.
    """
    cut = [passes.pieces(draws.first, batch) for batch in block]
    pieces = [piece for parts, _ in cut for piece in parts]
    if not pieces:
        return []
    size = max(size for _, size in cut)
    if draws.shareable(max_memory // 4):
        kept = draws.all()
        if passes.share(kept, draws.constant, pieces[0]):
            small = passes.can_vmap and draws.size * len(kept) <= STACKED
            return passes.predict(kept, stack(kept) if small else None, pieces, size, likelihood)
    together = min(64, _VMAP_BYTES // size, max_memory // (8 * max(1, draws.size)))
    if together < 2 or draws.size > _VMAP_WEIGHTS or not passes.split:
        together = 1
    results: list[Predictive | None] = [None] * len(pieces)
    for group in _grouped(draws.each(alone=together == 1), together):
        stacked = stack(group) if len(group) > 1 and passes.can_vmap else None
        for index, piece in enumerate(pieces):
            new = likelihood.predictive(passes.outputs(group, stacked, piece))
            old = results[index]
            results[index] = new if old is None else old.merge(new)
        group.clear()  # before the next draws are made
        del stacked
    return [result for result in results if result is not None]


def stack(group: list[Weights]) -> Weights:
    """Copy draws side by side."""
    return {name: torch.stack([draw[name] for draw in group]) for name in group[0]}


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
