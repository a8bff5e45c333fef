"""The Gaussian over a network's outputs when the network is linear in its weights around their mean.

f(x, w) ≈ f(x, w*) + J(x) (w − w*), so that w ~ N(w*, Σ) gives f ~ N(f(x, w*), J Σ Jᵀ). J is never held: a
backward pass for every output gives the gradients at the layers' outputs, and a structure turns them, layer
by layer and for a few examples at a time, into rows with the inner products J Σ Jᵀ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.batch import batch_len, slice_batch
from torchbayes.core.names import named_parameters
from torchbayes.curvature import Tape
from torchbayes.curvature.accumulate import Record
from torchbayes.laplace.network import Network
from torchbayes.laplace.structure import Records, Solved, Structure, record_size

__all__ = ["Moments", "moments"]


# More at a time than this leaves the cache and takes longer.
_CACHED = 32 << 20
# Tensors of the size of the draws: noise, its products, the draws, their probabilities and entropies; and
# gaps between them.
_DRAWN = 8


@dataclass
class Moments:
    """A Gaussian over the outputs of some examples.

    Attributes:
        mean: The network's outputs, (examples, …).
        variance: Variances of the outputs, (examples, outputs).
        row_sums: Sums of the covariance's rows, (examples, outputs), if asked for.
        covariance: Covariance, (examples, outputs, outputs), if asked for.
    """

    mean: Tensor
    variance: Tensor
    row_sums: Tensor | None = None
    covariance: Tensor | None = None


def moments(
    network: Network, structure: Structure, solved: Solved, inputs: Any, what: str, max_memory: int,
    draws: int = 0,
) -> Iterator[Moments]:  # fmt: skip
    """Yield the Gaussians over the outputs, for as many examples at a time as fit into memory.

    Args:
        network: The network.
        structure: The structure, for its weights.
        solved: The structure with its prior and noise.
        inputs: Inputs of the network.
        what: `"variance"`, `"row_sums"` or `"covariance"`.
        max_memory: Limit in bytes.
        draws: How many draws of the outputs the caller makes of a `"covariance"`.

    Raises:
        ValueError: If one example needs more than that.
    """
    count = batch_len(inputs)
    if count == 0:
        raise ValueError("there is nothing to predict: the inputs have no examples")
    own = named_parameters(network.model)
    tape = Tape(network.model, {name: own[name] for name in structure.weights})
    together, at_once = _measure(network, tape, structure, inputs, what, max_memory, draws)
    for start in range(0, count, together):
        part = slice_batch(inputs, start, min(start + together, count))
        with tape.block():
            outputs = network(part)
            with torch._C.DisableTorchFunction():
                found = _moments(tape, outputs, list(structure.weights), solved, what, at_once)
        solved.forget()
        yield found


def _measure(
    network: Network, tape: Tape, structure: Structure, inputs: Any, what: str, max_memory: int, draws: int,
) -> tuple[int, int]:  # fmt: skip
    """Return how many examples to run together, and how many of them to make rows of at once."""
    with tape.block():
        outputs = network(slice_batch(inputs, 0, 1))
        with torch._C.DisableTorchFunction():
            records = tape.backward(outputs, torch.ones_like(outputs))
    outputs_count = outputs[0].numel()
    each = outputs.element_size()
    shared, own = map(sum, zip(*map(record_size, records.values()), strict=True))
    held = outputs_count if what == "covariance" else 2
    # A forward pass keeps about as much as the layers' inputs and outputs.
    graph = each * (2 * shared + own * (1 + held) + held * outputs_count)
    rows = each * held * structure.row_size(records)
    if what == "covariance":
        rows += each * outputs_count**2  # a weight's part of it
    if draws:
        # The covariance with a larger diagonal and its root; noise, draws and what a link makes of them.
        graph += each * outputs_count * (2 * outputs_count + _DRAWN * draws)
    budget = max_memory // 2
    if graph > budget or rows > budget:
        fewer = ", take fewer samples" if draws else ""
        raise ValueError(
            f"the {what.replace('_', ' ')} of {outputs_count:,} outputs takes "
            f"{max(graph, rows) * 2 / 2**20:,.0f} MB for one example, but max_memory is "
            f"{max_memory / 2**20:,.0f} MB: give more{fewer}, use link='probit', or a Laplace of "
            "subset='last_layer'"
        )
    work = min(budget, _CACHED)
    return max(1, work // graph), max(1, work // rows)


def _moments(
    tape: Tape, outputs: Tensor, names: list[str], solved: Solved, what: str, at_once: int
) -> Moments:
    examples, count = len(outputs), outputs[0].numel()
    mean = outputs.detach()
    result = Moments(mean, mean.new_zeros(examples, count))
    if what == "covariance":
        every = [tape.backward(outputs, _unit(outputs, place)) for place in range(count)]
        with torch.no_grad():
            result.covariance = _covariance(every, names, solved, mean, at_once)
        result.variance = result.covariance.diagonal(dim1=1, dim2=2)
        return result
    total: Records = {}
    if what == "row_sums":
        result.row_sums = torch.zeros_like(result.variance)
        total = tape.backward(outputs, torch.ones_like(outputs))
    for place in range(count):
        records = tape.backward(outputs, _unit(outputs, place))
        with torch.no_grad():
            for start in range(0, examples, at_once):
                stop = min(start + at_once, examples)
                for rows, sums in zip(
                    solved.rows(records, names, start, stop),
                    solved.rows(total, names, start, stop) if total else [None] * len(names),
                    strict=bool(total),
                ):
                    if rows is None:
                        continue
                    result.variance[start:stop, place] += rows.square().sum(1)
                    if sums is not None and result.row_sums is not None:
                        result.row_sums[start:stop, place] += (rows * sums).sum(1)
    return result


def _covariance(
    every: list[dict[str, Record]], names: list[str], solved: Solved, mean: Tensor, at_once: int
) -> Tensor:
    examples, count = len(mean), len(every)
    covariance = mean.new_zeros(examples, count, count)
    for start in range(0, examples, at_once):
        stop = min(start + at_once, examples)
        # The rows of all outputs for one weight at a time.
        for parts in zip(*(solved.rows(r, names, start, stop) for r in every), strict=True):
            some = next((rows for rows in parts if rows is not None), None)
            if some is None:
                continue
            stacked = torch.stack([torch.zeros_like(some) if r is None else r for r in parts], 1)
            covariance[start:stop] += stacked @ stacked.transpose(1, 2)
    return covariance


def _unit(outputs: Tensor, place: int) -> Tensor:
    """Return a column that selects one output of every example."""
    column = outputs.new_zeros(len(outputs), outputs[0].numel())
    column[:, place] = 1
    return column.view(outputs.shape)
