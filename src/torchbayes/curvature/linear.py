"""Linear maps: `F.linear`, so `nn.Linear`, attention's projections, and recurrent layers step by step.

With input x and output gradient g of shape (examples, positions, features) the gradient of example i is
Gᵢ = Σₜ gᵢₜ xᵢₜᵀ. With one position Σᵢ Gᵢ² is a single product of squares, (g∘g)ᵀ(x∘x). With a few, it is one
of the products of pairs of positions, (Σₜ aₜ)² = Σₜ aₜ² + 2 Σ_{s<t} aₛaₜ. With many, the Gᵢ are computed,
some examples at a time, instead of the ordinary gradient, which is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchbayes.core.autocast import no_autocast
from torchbayes.curvature.accumulate import Record, Use, VectorRecord, wide
from torchbayes.curvature.products import add_products

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Capture

__all__ = [
    "PAIRS_UP_TO",
    "LinearRecord",
    "autocast_tensors",
    "linear",
    "products_of_pairs",
]

PAIRS_UP_TO = 4
"""Positions up to which products of pairs are cheaper than the gradients of single examples."""


def products_of_pairs(x: Tensor, g: Tensor, total: Tensor, fresh: bool) -> None:
    """Add Σᵢ (Σₜ gᵢₜ xᵢₜᵀ)² to `total`, of shape (outputs, inputs), by products of pairs of positions.

    (Σₜ aₜ)² = Σₜ aₜ² + 2 Σ_{s<t} aₛaₜ, and each term is one matrix product over the examples: with one
    position that is (g∘g)ᵀ(x∘x).

    Args:
        x: Of shape (examples, positions, inputs).
        g: Of shape (examples, positions, outputs).
        total: Where to add, or what to overwrite.
        fresh: Whether to overwrite.
    """
    positions = x.shape[1]
    if positions == 1:
        total.addmm_(g[:, 0].square().t(), x[:, 0].square(), beta=0.0 if fresh else 1.0)
        return
    for shift in range(positions):
        size = positions - shift
        a = (x[:, :size] * x[:, shift:]).flatten(0, 1)
        b = (g[:, :size] * g[:, shift:]).flatten(0, 1)
        beta = 0.0 if fresh and shift == 0 else 1.0
        total.addmm_(b.t(), a, beta=beta, alpha=1.0 if shift == 0 else 2.0)


class LinearRecord(Record):
    """A use of a weight matrix.

    Args:
        target: The weight, of shape (outputs, inputs).
        x: The input, of shape (examples, positions, inputs).
        g: The output's gradient, of shape (examples, positions, outputs).
    """

    def __init__(self, target: Tensor, x: Tensor, g: Tensor) -> None:
        super().__init__(target, x.shape[0])
        self.x, self.g = wide(x), wide(g)

    def per_example(self, start: int, stop: int) -> Tensor:
        """Σₜ gₜ xₜᵀ of some examples."""
        return torch.bmm(self.g[start:stop].transpose(1, 2), self.x[start:stop])

    def write_to(self, total: Tensor, fresh: bool) -> None:
        """By pairs of positions if there are few."""
        if self.x.shape[1] <= PAIRS_UP_TO:
            products_of_pairs(self.x, self.g, total, fresh)
        else:
            super().write_to(total, fresh)

    @classmethod
    def joined(cls, records: Sequence[Record]) -> Record | None:
        """Several uses are one use with more positions."""
        own = [r for r in records if isinstance(r, LinearRecord)]
        if len(own) < len(records):
            return None
        x = torch.cat([r.x for r in own], 1)
        return cls(records[0].target, x, torch.cat([r.g for r in own], 1))


def _rows(tensor: Tensor, sequence_batch: int | None) -> Tensor:
    """(examples, positions, features), from examples first or, inside attention, positions first."""
    features = tensor.shape[-1]
    if sequence_batch is not None:
        return tensor.reshape(-1, sequence_batch, features).transpose(0, 1)
    return tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1, features)


def autocast_tensors(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """The tensors of a linear map of `x` in the type that autocast would compute it in, if it is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return [x, *weights]
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None else t.to(dtype) for t in (x, *weights)]


class _SequenceLinear(torch.autograd.Function):
    """A linear map of sequences whose backward pass takes gradients per example."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, use: Use, batch: int | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.use, ctx.batch = use, batch
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        use: Use = ctx.use
        with torch._C.DisableTorchFunction(), no_autocast(g.device):
            grad_x = g @ weight if ctx.needs_input_grad[0] else None
            record = LinearRecord(use.target, _rows(x, ctx.batch), _rows(g, ctx.batch))
            if use.begin(record.examples):
                total, fresh = use.sink()
                grad_w = torch.empty_like(total)
                squares = total if fresh else torch.empty_like(total)
                left, scratch = record.g.transpose(1, 2), use.uses.scratch
                add_products(left, record.x, grad_w, squares, True, scratch)
                if not fresh:
                    total.add_(squares)
            else:
                use.defer(record)
                grad_w = g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            grad_b = g.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_w.to(weight.dtype), grad_b, None, None


def linear(
    capture: Capture,
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """The rule for `F.linear`."""
    tracker = capture.tracker
    if tracker.is_constant(input):
        return capture.other(func, (input, weight, bias))
    target, shift = tracker.target(weight), tracker.target(bias)
    batch = tracker.sequence_batch
    shape = _rows(input, batch).shape
    first = shift if target is None else target
    assert first is not None
    tracker.check_examples(shape[0], first)
    bias_use = None if shift is None else capture.use(shift)
    factors = None if target is None else capture.factors.get(id(target))
    if target is not None and factors is None and shape[1] > PAIRS_UP_TO:
        tensors = autocast_tensors(input, weight, bias)
        output: Tensor = _SequenceLinear.apply(*tensors, capture.use(target), batch)  # type: ignore[no-untyped-call]
        target = None
    else:
        output = func(input, weight, bias)
    weight_use = None if target is None else capture.use(target)
    data = input.detach()

    def arrived(gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            g = _rows(gradient, batch)
            if weight_use is not None:
                if factors is None:
                    weight_use.arrived(LinearRecord(weight_use.target, _rows(data, batch), g))
                else:
                    weight_use.begin(len(g))
                    factors.add(wide(_rows(data, batch)), wide(g))
            if bias_use is not None:
                if factors is not None and factors.bias is bias_use.target:
                    bias_use.begin(len(g))
                else:
                    bias_use.arrived(VectorRecord(bias_use.target, wide(g).sum(1)))

    if weight_use is not None or bias_use is not None:
        output.register_hook(arrived)
    return output
