"""Normalisation layers and PReLU: one scale (and shift) per channel or feature.

With x̂ the normalised input, the gradient of example i is Σₚ gᵢₚ x̂ᵢₚ for a scale and Σₚ gᵢₚ for a shift,
summed over the positions p that share it. The ordinary gradient comes with torch's own backward pass. In
training mode batch norm's x̂ depends on the whole batch: an example's gradient is then that of the batch's
loss through that example's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchbayes.curvature.accumulate import CHUNK, Record, VectorRecord, wide

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Capture

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "prelu", "rms_norm"]


def _affine(
    capture: Capture, output: Tensor, weight: Tensor | None, bias: Tensor | None,
    scale_gradients: Callable[[Tensor], Tensor], shift_gradients: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Hook a layer's output for the gradients of its scale and shift, and return it.

    Args:
        capture: The capture.
        output: The layer's output.
        weight: The scale.
        bias: The shift.
        scale_gradients: Map from the output's gradient to those of the scale, one row per example.
        shift_gradients: The same for the shift.
    """
    tracker = capture.tracker
    scale, shift = tracker.target(weight), tracker.target(bias)
    if scale is None and shift is None:
        return output
    tracker.check_examples(output.shape[tracker.layout[0]], scale, shift)
    uses = [
        (capture.uses.use(target), rule)
        for target, rule in ((scale, scale_gradients), (shift, shift_gradients))
        if target is not None
    ]

    def arrived(gradient: Tensor) -> None:
        g = wide(gradient)
        for use, rule in uses:
            use.arrived(VectorRecord(use.target, rule(g).view(-1, *use.target.shape)))

    capture.uses.on_gradient(output, arrived)
    return output


def _over_positions(values: Tensor) -> Tensor:
    """Sum over all dimensions except examples and channels."""
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def _over_rows(features: int) -> Callable[[Tensor], Tensor]:
    """Return a function that sums over the dimensions between the examples and the last `features`."""

    def summed(values: Tensor) -> Tensor:
        between = values.dim() - features
        return values.flatten(1, between - 1).sum(1) if between > 1 else values

    return summed


def _by_channel(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm(
    capture: Capture, func: Callable[..., Tensor], input: Tensor, weight: Tensor | None,
    bias: Tensor | None, running_mean: Tensor, running_var: Tensor, training: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """Apply the rule for `torch.batch_norm`."""
    output = func(
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    )
    x = input.detach()
    if training:
        # torch keeps both for its own backward pass; if not under these names, they are recomputed.
        mean = getattr(output.grad_fn, "_saved_result1", None)
        scale = getattr(output.grad_fn, "_saved_result2", None)
        if mean is None or scale is None or mean.numel() != x.shape[1]:
            var, mean = torch.var_mean(wide(x), [d for d in range(x.dim()) if d != 1], correction=0)
            scale = (var + eps).rsqrt()
    else:
        mean, scale = running_mean.clone(), (running_var + eps).rsqrt()
    centre, rate = wide(mean), wide(scale)

    def scale_gradients(g: Tensor) -> Tensor:
        rows = g.new_empty(x.shape[0], x.shape[1])
        step = max(1, CHUNK // 4 // max(1, x[0].numel()))
        for start in range(0, len(x), step):
            part = wide(x[start : start + step])
            product = capture.uses.scratch.get("product", part.shape, part)
            torch.sub(part, _by_channel(centre, x), out=product).mul_(g[start : start + step])
            rows[start : start + step] = _over_positions(product)
        return rows.mul_(rate)

    return _affine(capture, output, weight, bias, scale_gradients, _over_positions)


def _standardised(rows: Tensor, eps: float) -> Tensor:
    """Subtract the mean of each row and divide by its standard deviation."""
    var, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    return (rows - mean).mul_((var + eps).rsqrt())


def layer_norm(
    capture: Capture, func: Callable[..., Tensor], input: Tensor, normalized_shape: Sequence[int],
    weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    """Apply the rule for `torch.layer_norm`."""
    output = func(input, normalized_shape, weight, bias, eps, cudnn_enable)
    x, dims = input.detach(), len(normalized_shape)
    summed = _over_rows(dims)

    def scale_gradients(g: Tensor) -> Tensor:
        rows = wide(x).flatten(x.dim() - dims)
        return summed(_standardised(rows, eps).view(x.shape).mul_(g))

    return _affine(capture, output, weight, bias, scale_gradients, summed)


def rms_norm(
    capture: Capture, func: Callable[..., Tensor], input: Tensor, normalized_shape: Sequence[int],
    weight: Tensor | None = None, eps: float | None = None,
) -> Tensor:  # fmt: skip
    """Apply the rule for `torch.rms_norm`."""
    x, dims = input.detach(), len(normalized_shape)
    summed = _over_rows(dims)

    def scale_gradients(g: Tensor) -> Tensor:
        rows = wide(x).flatten(x.dim() - dims)
        least = torch.finfo(x.dtype).eps if eps is None else eps
        roots = (rows.square().mean(-1, keepdim=True) + least).rsqrt()
        return summed((rows * roots).view(x.shape).mul_(g))

    output = func(input, normalized_shape, weight, eps)
    return _affine(capture, output, weight, None, scale_gradients, summed)


def group_norm(
    capture: Capture, func: Callable[..., Tensor], input: Tensor, num_groups: int,
    weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Apply the rule for `torch.group_norm`."""
    x = input.detach()

    def scale_gradients(g: Tensor) -> Tensor:
        rows = wide(x).reshape(x.shape[0], num_groups, -1)
        return _over_positions(_standardised(rows, eps).view(x.shape).mul_(g))

    output = func(input, num_groups, weight, bias, eps, cudnn_enabled)
    return _affine(capture, output, weight, bias, scale_gradients, _over_positions)


def instance_norm(
    capture: Capture, func: Callable[..., Tensor], input: Tensor, weight: Tensor | None,
    bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """Apply the rule for `torch.instance_norm`."""
    output = func(
        input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps,
        cudnn_enabled,
    )  # fmt: skip
    x = input.detach()
    # The running statistics may change before the backward pass.
    kept = None
    if not use_input_stats:
        assert running_mean is not None
        assert running_var is not None
        kept = running_mean.clone(), running_var.clone()

    def scale_gradients(g: Tensor) -> Tensor:
        if kept is None:
            return _over_positions(_standardised(wide(x).flatten(2), eps).view(x.shape).mul_(g))
        mean, scale = _by_channel(kept[0], x), _by_channel((kept[1] + eps).rsqrt(), x)
        return _over_positions((wide(x) - mean).mul_(scale).mul_(g))

    return _affine(capture, output, weight, bias, scale_gradients, _over_positions)


def prelu(capture: Capture, func: Callable[..., Tensor], input: Tensor, weight: Tensor) -> Any:
    """Apply the rule for `torch.prelu`: the gradient of the slope is Σₚ gₚ min(xₚ, 0)."""
    slope = capture.tracker.target(weight)
    if slope is None or capture.tracker.is_constant(input):
        return capture.other(func, (input, weight))
    capture.tracker.check_examples(input.shape[0], slope)
    output, data = func(input, weight), input.detach()

    def record(gradient: Tensor) -> Record:
        slopes = wide(gradient) * wide(data).clamp(max=0)
        if slope.numel() == 1:
            slopes = slopes.flatten(1).sum(1, keepdim=True)
        return VectorRecord(slope, _over_positions(slopes).view(-1, *slope.shape))

    capture.watch(output, slope, record)
    return output
