"""Linear maps: `F.linear`, so `nn.Linear`, attention's projections, and recurrent layers step by step.

With input x and output gradient g of shape (examples, positions, features) the gradient of example i is
Gᵢ = Σₜ gᵢₜ xᵢₜᵀ. With one position Σᵢ Gᵢ² is a single product of squares, (g∘g)ᵀ(x∘x). With a few, it is one
of the products of pairs of positions, (Σₜ aₜ)² = Σₜ aₜ² + 2 Σ_{s<t} aₛaₜ. With many, the Gᵢ are computed,
a few examples at a time, instead of the ordinary gradient, which is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchbayes.core.autocast import no_autocast
from torchbayes.core.workspace import Workspace
from torchbayes.curvature.accumulate import CHUNK, Record, Use, VectorRecord, wide

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Capture

__all__ = [
    "PAIRS_UP_TO",
    "add_both",
    "add_products",
    "autocast_tensors",
    "linear",
    "products_of_pairs",
]

PAIRS_UP_TO = 4
"""Number of positions up to which products of pairs are cheaper than the gradients of single examples."""

# Entries from which a matrix is processed row by row, in tiles of so many entries.
_LARGE, _TILE = 2**17, 2**18


def products_of_pairs(x: Tensor, g: Tensor, total: Tensor, fresh: bool) -> None:
    """Add Σᵢ (Σₜ gᵢₜ xᵢₜᵀ)² to `total`, of shape (outputs, inputs), by products of pairs of positions.

    (Σₜ aₜ)² = Σₜ aₜ² + 2 Σ_{s<t} aₛaₜ, and each term is one matrix product over the examples: with one
    position that is (g∘g)ᵀ(x∘x).

    Args:
        x: Inputs, of shape (examples, positions, inputs).
        g: Gradients of the outputs, of shape (examples, positions, outputs).
        total: Tensor to add to, or to overwrite.
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


def add_products(
    left: Tensor, right: Tensor, sums: Tensor, squares: Tensor, fresh: bool, scratch: Workspace
) -> None:
    """Add Σᵢ LᵢRᵢ to `sums` and Σᵢ (LᵢRᵢ)², squared by entry, to `squares`, or overwrite both if fresh.

    What costs time is memory traffic: products are computed in kept buffers that fit into a cache, for all
    examples at once where the matrix is small, for a few rows of one example where it is large.

    Args:
        left: Lᵢ, of shape (examples, rows, inner).
        right: Rᵢ, of shape (examples, inner, columns).
        sums: Sums of products, of shape (rows, columns).
        squares: Sums of squares, of shape (rows, columns).
        fresh: Whether to overwrite.
        scratch: Source of buffers.
    """
    examples, rows, columns = left.shape[0], left.shape[1], right.shape[2]
    if rows * columns > _LARGE:
        height = max(1, _TILE // columns)
        for top in range(0, rows, height):
            part = slice(top, min(top + height, rows))
            total, square = sums[part], squares[part]
            product = scratch.get("product", total.shape, left)
            for i in range(examples):
                if fresh and i == 0:
                    torch.mm(left[0, part], right[0], out=total)
                    torch.mul(total, total, out=square)
                else:
                    torch.mm(left[i, part], right[i], out=product)
                    total.add_(product)
                    square.addcmul_(product, product)
        return
    step = max(1, CHUNK // (rows * columns))
    for start in range(0, examples, step):
        stop = min(start + step, examples)
        product = scratch.get("product", (stop - start, rows, columns), left)
        torch.bmm(left[start:stop], right[start:stop], out=product)
        if fresh and start == 0:
            torch.sum(product, 0, out=sums)
            torch.sum(product.mul_(product), 0, out=squares)
        else:
            sums.add_(product.sum(0))
            squares.add_(product.mul_(product).sum(0))


def add_both(total: Tensor, fresh: bool, write: Callable[[Tensor, Tensor], None]) -> Tensor:
    """Let `write` fill a gradient and its squares; add the squares to `total` and return the gradient."""
    gradient = torch.empty_like(total)
    squares = total if fresh else torch.empty_like(total)
    write(gradient, squares)
    if not fresh:
        total.add_(squares)
    return gradient


class LinearRecord(Record):
    """A use of a weight matrix.

    Args:
        target: The weight, of shape (outputs, inputs).
        x: Input, of shape (examples, positions, inputs).
        g: Gradient of the output, of shape (examples, positions, outputs).
    """

    def __init__(self, target: Tensor, x: Tensor, g: Tensor) -> None:
        super().__init__(target, x.shape[0])
        self.x, self.g = wide(x), wide(g)

    def per_example(self, start: int, stop: int) -> Tensor:
        """Return Σₜ gₜ xₜᵀ for a range of examples."""
        return torch.bmm(self.g[start:stop].transpose(1, 2), self.x[start:stop])

    def write_to(self, total: Tensor, fresh: bool) -> None:
        """Use pairs of positions if there are few positions."""
        if self.x.shape[1] <= PAIRS_UP_TO:
            products_of_pairs(self.x, self.g, total, fresh)
        else:
            super().write_to(total, fresh)

    @classmethod
    def joined(cls, records: Sequence[Record]) -> Record | None:
        """Treat several uses as one use with more positions."""
        own = [r for r in records if isinstance(r, LinearRecord)]
        if len(own) < len(records):
            return None
        x, g = torch.cat([r.x for r in own], 1), torch.cat([r.g for r in own], 1)
        return cls(records[0].target, x, g)


def _rows(tensor: Tensor, sequence_batch: int | None) -> Tensor:
    """Reshape to (examples, positions, features), from positions first inside attention."""
    features = tensor.shape[-1]
    if sequence_batch is not None:
        return tensor.reshape(-1, sequence_batch, features).transpose(0, 1)
    return tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1, features)


def autocast_tensors(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """Convert the tensors of a linear map of `x` to the type that autocast computes it in, if it is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return [x, *weights]
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None else t.to(dtype) for t in (x, *weights)]


class _SequenceLinear(torch.autograd.Function):
    """A linear map of sequences whose backward pass computes gradients per example."""

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
                left, right, scratch = record.g.transpose(1, 2), record.x, use.uses.scratch
                grad_w = add_both(
                    *use.sink(),
                    lambda g, squares: add_products(left, right, g, squares, True, scratch),
                )
            else:
                use.defer(record)
                grad_w = g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            grad_b = g.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_w.to(weight.dtype), grad_b, None, None


def linear(
    capture: Capture, func: Callable[..., Tensor], input: Tensor, weight: Tensor,
    bias: Tensor | None = None,
) -> Any:  # fmt: skip
    """Apply the rule for `F.linear`."""
    tracker = capture.tracker
    if tracker.is_constant(input):
        return capture.other(func, (input, weight, bias))
    target, shift = tracker.target(weight), tracker.target(bias)
    batch = tracker.sequence_batch
    shape = _rows(input, batch).shape
    tracker.check_examples(shape[0], target, shift)
    bias_use = None if shift is None else capture.uses.use(shift)
    factors = None if target is None else capture.factors.get(id(target))
    apart = factors is None and shape[1] > PAIRS_UP_TO and not capture.uses.keeps
    if target is not None and apart:
        tensors = autocast_tensors(input, weight, bias)
        output: Tensor = _SequenceLinear.apply(*tensors, capture.uses.use(target), batch)  # type: ignore[no-untyped-call]
        target = None
    else:
        output = func(input, weight, bias)
    weight_use = None if target is None else capture.uses.use(target)
    data = input.detach()

    def arrived(gradient: Tensor) -> None:
        g = _rows(gradient, batch)
        if weight_use is not None:
            if factors is None:
                weight_use.arrived(LinearRecord(weight_use.target, _rows(data, batch), g))
            else:
                weight_use.begin(len(g))
                if factors.wanted:
                    factors.add(wide(_rows(data, batch)), wide(g))
        if bias_use is not None:
            if factors is not None and factors.bias is bias_use.target:
                bias_use.begin(len(g))
            else:
                bias_use.arrived(VectorRecord(bias_use.target, wide(g).sum(1), target))

    if weight_use is not None or bias_use is not None:
        capture.uses.on_gradient(output, arrived)
    return output
