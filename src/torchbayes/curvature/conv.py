"""Convolutions, transposed or not, of 1, 2 or 3 dimensions.

The gradient of example i, Gᵢ = gᵢ · unfold(xᵢ)ᵀ, takes the multiplications of the ordinary weight gradient,
Σᵢ Gᵢ, and is computed instead of it, a few examples at a time. There are three ways, and which is fastest
depends on the shape: unfold and multiply; the weight gradient of a convolution whose groups are the
examples; and, with only a few output positions, products of pairs of them.

A transposed convolution is the adjoint of a convolution with the same weight, so its weight gradient is
that convolution's with input and output gradient swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchbayes.core.autocast import no_autocast
from torchbayes.core.workspace import Workspace
from torchbayes.curvature.accumulate import CHUNK, Record, Use, VectorRecord, wide
from torchbayes.curvature.linear import (
    PAIRS_UP_TO,
    add_both,
    add_products,
    autocast_tensors,
    products_of_pairs,
)  # fmt: skip

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Capture

__all__ = ["ConvRecord", "Geometry", "conv", "conv_transpose"]


@dataclass(frozen=True)
class Geometry:
    """The arguments of a convolution besides its weight: one number per dimension, and the groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = (0, 0, 0)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the convolution."""
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding[: len(self.stride)], self.groups,
        )  # fmt: skip

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of input, weight and bias, those that `mask` asks for."""
        outputs = [weight.shape[1] * self.groups if self.transposed else weight.shape[0]]
        return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
            g, x, weight, outputs, self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding[: len(self.stride)], self.groups, mask,
        )  # fmt: skip


class _Patches:
    """The patches of a batch that a kernel sees, unfolded for a few examples at a time.

    Copying from a strided view is several times as fast as `F.unfold`.
    """

    def __init__(self, x: Tensor, kernel: list[int], at: Geometry, scratch: Workspace) -> None:
        self.scratch = scratch
        if any(at.padding):
            padded = [n + 2 * p for n, p in zip(x.shape[2:], at.padding, strict=True)]
            whole = scratch.get("padded", [*x.shape[:2], *padded], x).zero_()
            inside = whole
            for d, (n, p) in enumerate(zip(x.shape[2:], at.padding, strict=True)):
                inside = inside.narrow(d + 2, p, n)
            inside.copy_(x)
            x = whole
        self.x = x.contiguous()
        spatial = self.x.stride()[2:]
        places = [
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(self.x.shape[2:], kernel, at.stride, at.dilation, strict=True)
        ]
        self.sizes = [x.shape[1], *kernel, *places]
        self.strides = [
            *self.x.stride()[:2],
            *(s * d for s, d in zip(spatial, at.dilation, strict=True)),
            *(s * t for s, t in zip(spatial, at.stride, strict=True)),
        ]
        self.rows = x.shape[1] * torch.Size(kernel).numel()
        self.positions = torch.Size(places).numel()

    def of(self, start: int, stop: int) -> Tensor:
        """Return the patches of some examples, of shape (stop − start, channels × kernel, positions)."""
        windows = self.x.as_strided(
            [stop - start, *self.sizes],
            self.strides,
            self.x.storage_offset() + start * self.strides[0],
        )
        columns = self.scratch.get("columns", windows.shape, self.x)
        return columns.copy_(windows).view(stop - start, self.rows, self.positions)


class ConvRecord(Record):
    """A use of a convolution's weight.

    Args:
        target: The weight.
        x: Input of the convolution; for a transposed one, the gradient of its output.
        g: Gradient of the output; for a transposed one, its input.
        geometry: Geometry of the convolution that is not transposed.
        scratch: Source of buffers.

    Attributes:
        swapped: Whether the convolution is a transposed one.
    """

    def __init__(
        self, target: Tensor, x: Tensor, g: Tensor, geometry: Geometry, scratch: Workspace
    ) -> None:
        super().__init__(target, x.shape[0])
        self.x, self.g, self.geometry, self.scratch = wide(x), wide(g), geometry, scratch
        self.swapped = False

    def patches(self) -> _Patches:
        """Return the input's patches."""
        return _Patches(self.x, list(self.target.shape[2:]), self.geometry, self.scratch)

    def per_example(self, start: int, stop: int) -> Tensor:
        """Return the gradients of a range of examples, as the groups of one convolution."""
        shape, at = self.target.shape, self.geometry
        x, g = self.x[start:stop], self.g[start:stop]
        count = len(x)
        grouped = Geometry(at.stride, at.padding, at.dilation, at.groups * count)
        # Only the shape of the weight matters for its gradient.
        weight = x.new_empty(1).expand(count * shape[0], *shape[1:])
        g, x = g.reshape(1, -1, *g.shape[2:]), x.reshape(1, -1, *x.shape[2:])
        gradients = grouped.backward(g, x, weight, [False, True, False])[1]
        assert gradients is not None
        return gradients.view(count, *shape)

    def few_positions(self) -> bool:
        """Whether products of pairs of positions are the cheapest way to the squares."""
        return self.g[0, 0].numel() <= PAIRS_UP_TO and self.geometry.groups == 1

    def write_to(self, total: Tensor, fresh: bool) -> None:
        """Add the squares alone."""
        if self.few_positions():
            columns = self.patches().of(0, self.examples).transpose(1, 2)
            g = self.g.flatten(2).transpose(1, 2)
            products_of_pairs(columns, g, total.view(len(total), -1), fresh)
        else:
            add_both(total, fresh, self.write_both)

    def write_both(self, gradient: Tensor, squares: Tensor) -> None:
        """Overwrite `gradient` and `squares` with the sums over examples of Gᵢ and Gᵢ²."""
        if self._as_groups():
            step = max(1, CHUNK // self.target.numel())
            for start in range(0, self.examples, step):
                chunk = self.per_example(start, min(start + step, self.examples))
                if start == 0:
                    torch.sum(chunk, 0, out=gradient)
                    torch.sum(chunk.square_(), 0, out=squares)
                else:
                    gradient.add_(chunk.sum(0))
                    squares.add_(chunk.square_().sum(0))
            return
        groups = self.geometry.groups
        g = self.g.reshape(self.examples, groups, -1, self.g[0, 0].numel())
        patches = self.patches()
        step = max(1, CHUNK // (patches.rows * patches.positions))
        sums, totals = (t.view(groups, g.shape[2], -1) for t in (gradient, squares))
        for start in range(0, self.examples, step):
            stop = min(start + step, self.examples)
            columns = patches.of(start, stop).view(stop - start, groups, -1, patches.positions)
            for i in range(groups):
                left, right = g[start:stop, i], columns[:, i].transpose(1, 2)
                add_products(left, right, sums[i], totals[i], start == 0, self.scratch)

    def _as_groups(self) -> bool:
        """Whether the weight gradient of a grouped convolution is faster than unfolding.

        Found by timing: it is with many positions, few weights and enough channels to fill a vector; and
        with several groups, where unfolding would need a product for each.
        """
        if self.geometry.groups > 1:
            return True
        positions, channels = self.g[0, 0].numel(), self.x.shape[1]
        return positions >= 256 and self.target.numel() <= 10_000 and channels >= 8


def _record(use: Use, x: Tensor, g: Tensor, at: Geometry) -> ConvRecord:
    """Make the record of a use; in a transposed convolution, input and gradient swap their roles."""
    first, second = (g, x) if at.transposed else (x, g)
    plain = Geometry(at.stride, at.padding, at.dilation, at.groups)
    record = ConvRecord(use.target, first, second, plain, use.uses.scratch)
    record.swapped = at.transposed
    return record


class _Conv(torch.autograd.Function):
    """A convolution whose backward pass computes the weight's gradient per example."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, at: Geometry, use: Use,
        bias_use: Use | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.at, ctx.use, ctx.bias_use = at, use, bias_use
        return at.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        at: Geometry = ctx.at
        use: Use = ctx.use
        with torch._C.DisableTorchFunction(), no_autocast(g.device):
            mask = [ctx.needs_input_grad[0], False, False]
            grad_b: Tensor | None = None
            if ctx.needs_input_grad[2]:
                # Not by convolution_backward: oneDNN computes the weight's gradient together with it.
                sums = wide(g).flatten(2).sum(2)
                grad_b = sums.sum(0).to(g.dtype)
                if ctx.bias_use is not None:
                    ctx.bias_use.arrived(VectorRecord(ctx.bias_use.target, sums))
            record = _record(use, x, g, at)
            grad_w: Tensor | None = None
            if not use.begin(record.examples):
                use.defer(record)
                mask[1] = True
            elif record.few_positions():
                record.write_to(*use.sink())
                mask[1] = True
            else:
                grad_w = add_both(*use.sink(), record.write_both).to(weight.dtype)
            ordinary = at.backward(g, x, weight, mask) if any(mask) else (None, None, None)
        return ordinary[0], ordinary[1] if grad_w is None else grad_w, grad_b, None, None, None


def _ntuple(value: int | Sequence[int], count: int) -> list[int]:
    """Return one number per dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _apply(
    capture: Capture, func: Callable[..., Tensor], args: tuple[Any, ...], at: Geometry
) -> Tensor:
    tracker = capture.tracker
    x, weight, bias = args[:3]
    target, shift = tracker.target(weight), tracker.target(bias)
    first = shift if target is None else target
    assert first is not None
    if x.dim() != weight.dim():
        raise ValueError(
            f"{tracker.describe(first)} convolves one example without a batch dimension: give the model "
            "a batch"
        )
    tracker.check_examples(x.shape[0], first)
    bias_use = None if shift is None else capture.uses.use(shift)
    factors = None if target is None else capture.factors.get(id(target))
    if target is not None and factors is None and not capture.uses.keeps:
        tensors = autocast_tensors(x, weight, bias)
        return _Conv.apply(*tensors, at, capture.uses.use(target), bias_use)  # type: ignore[no-any-return, no-untyped-call]
    output = func(*args)
    weight_use = None if target is None else capture.uses.use(target)
    data = x.detach()

    def arrived(gradient: Tensor) -> None:
        g = wide(gradient).flatten(2)
        if weight_use is not None and factors is None:
            weight_use.arrived(_record(weight_use, data, gradient, at))
        elif weight_use is not None and factors is not None:
            weight_use.begin(len(g))
            if factors.wanted:
                record = ConvRecord(weight_use.target, data, gradient, at, capture.uses.scratch)
                columns = record.patches().of(0, len(g))
                factors.add(columns.transpose(1, 2), g.transpose(1, 2))
        if bias_use is not None:
            if factors is not None and factors.bias is bias_use.target:
                bias_use.begin(len(g))
            else:
                bias_use.arrived(VectorRecord(bias_use.target, g.sum(2), target))

    capture.uses.on_gradient(output, arrived)
    return output


def conv(
    capture: Capture, func: Callable[..., Tensor], input: Tensor, weight: Tensor,
    bias: Tensor | None = None, stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
) -> Any:  # fmt: skip
    """Apply the rule for `torch.conv1d`, `torch.conv2d` and `torch.conv3d`."""
    if capture.tracker.is_constant(input):
        return capture.other(func, (input, weight, bias, stride, padding, dilation, groups))
    dims = weight.dim() - 2
    steps, spacing = _ntuple(stride, dims), _ntuple(dilation, dims)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(spacing, weight.shape[2:], strict=True)]
        if any(t % 2 for t in total):
            # Like torch: the odd one goes at the end.
            input = F.pad(input, [amount for t in reversed(total) for amount in (0, t % 2)])
        padding = [t // 2 for t in total]
    assert not isinstance(padding, str)
    at = Geometry(steps, _ntuple(padding, dims), spacing, groups)
    given = (input, weight, bias, steps, at.padding, spacing, groups)
    return _apply(capture, func, given, at)


def conv_transpose(
    capture: Capture, func: Callable[..., Tensor], input: Tensor, weight: Tensor,
    bias: Tensor | None = None, stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0, groups: int = 1, dilation: int | Sequence[int] = 1,
) -> Any:  # fmt: skip
    """Apply the rule for `torch.conv_transpose1d`, `torch.conv_transpose2d` and `torch.conv_transpose3d`."""
    given = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    if capture.tracker.is_constant(input):
        return capture.other(func, given)
    dims = weight.dim() - 2
    at = Geometry(
        _ntuple(stride, dims), _ntuple(padding, dims), _ntuple(dilation, dims), groups, True,
        tuple(_ntuple(output_padding, dims)),
    )  # fmt: skip
    return _apply(capture, func, given, at)
