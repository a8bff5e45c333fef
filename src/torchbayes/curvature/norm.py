"""Normalisation layers and PReLU: one scale (and shift) per channel or feature.

With x̂ the normalised input, the gradient of example i is Σₚ gᵢₚ x̂ᵢₚ for a scale and Σₚ gᵢₚ for a shift,
summed over the positions p that share it. The ordinary gradient comes with torch's own backward pass. In
training mode batch norm's x̂ depends on the whole batch: an example's gradient is then that of the batch's
loss through that example's activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchbayes.curvature.arguments import bind
from torchbayes.curvature.products import CHUNK
from torchbayes.curvature.record import VectorRecord, wide

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Capture

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "prelu", "rms_norm"]

_BATCH = (
    "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled",
)  # fmt: skip
_INSTANCE = (
    "input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps",
    "cudnn_enabled",
)  # fmt: skip


def _affine(
    capture: Capture,
    output: Tensor,
    given: dict[str, Any],
    scale_gradients: Callable[[Tensor], Tensor],
    shift_gradients: Callable[[Tensor], Tensor],
) -> None:
    """Hook `output` for the gradients of a scale and a shift.

    Args:
        capture: The capture.
        output: The layer's output.
        given: Its arguments, `weight` and `bias` among them.
        scale_gradients: From the output's gradient to those of the scale, one row per example.
        shift_gradients: The same for the shift.
    """
    tracker = capture.tracker
    weight, bias = tracker.target(given["weight"]), tracker.target(given.get("bias"))
    first = bias if weight is None else weight
    if first is None:
        return
    tracker.check_examples(output.shape[tracker.layout[0]], first)
    uses = [
        (capture.use(target), rule)
        for target, rule in ((weight, scale_gradients), (bias, shift_gradients))
        if target is not None
    ]

    def arrived(gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            g = wide(gradient)
            for use, rule in uses:
                use.arrived(VectorRecord(use.target, rule(g).view(-1, *use.target.shape)))

    output.register_hook(arrived)


def _over_positions(values: Tensor) -> Tensor:
    """Sums over all dimensions but examples and channels."""
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def _over_rows(features: int) -> Callable[[Tensor], Tensor]:
    """Sums over the dimensions between the examples and the last `features`."""

    def summed(values: Tensor) -> Tensor:
        between = values.dim() - features
        return values.flatten(1, between - 1).sum(1) if between > 1 else values

    return summed


def _by_channel(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rule for `F.batch_norm`."""
    given = bind(_BATCH, args, kwargs)
    output: Tensor = func(*args, **kwargs)
    x: Tensor = given["input"].detach()
    if given["training"]:
        # torch keeps both for its own backward pass; if not under these names, they are computed again.
        mean = getattr(output.grad_fn, "_saved_result1", None)
        scale = getattr(output.grad_fn, "_saved_result2", None)
        if mean is None or scale is None or mean.numel() != x.shape[1]:
            var, mean = torch.var_mean(wide(x), [d for d in range(x.dim()) if d != 1], correction=0)
            scale = (var + given["eps"]).rsqrt()
    else:
        mean = given["running_mean"].clone()
        scale = (given["running_var"] + given["eps"]).rsqrt()
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

    _affine(capture, output, given, scale_gradients, _over_positions)
    return output


def _standardised(rows: Tensor, eps: float) -> Tensor:
    """Rows less their mean, divided by their standard deviation."""
    var, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    return (rows - mean).mul_((var + eps).rsqrt())


def layer_norm(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rule for `F.layer_norm`."""
    names = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
    given = bind(names, args, kwargs, weight=None, bias=None, eps=1e-5)
    output: Tensor = func(*args, **kwargs)
    x, dims = given["input"].detach(), len(given["normalized_shape"])
    summed = _over_rows(dims)

    def scale_gradients(g: Tensor) -> Tensor:
        rows = wide(x).flatten(x.dim() - dims)
        return summed(_standardised(rows, given["eps"]).view(x.shape).mul_(g))

    _affine(capture, output, given, scale_gradients, summed)
    return output


def rms_norm(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rule for `F.rms_norm`."""
    given = bind(
        ("input", "normalized_shape", "weight", "eps"), args, kwargs, weight=None, eps=None
    )
    output: Tensor = func(*args, **kwargs)
    x, dims = given["input"].detach(), len(given["normalized_shape"])
    summed = _over_rows(dims)

    def scale_gradients(g: Tensor) -> Tensor:
        rows = wide(x).flatten(x.dim() - dims)
        eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
        roots = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
        return summed((rows * roots).view(x.shape).mul_(g))

    _affine(capture, output, given, scale_gradients, summed)
    return output


def group_norm(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rule for `F.group_norm`."""
    names = ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")
    given = bind(names, args, kwargs, weight=None, bias=None, eps=1e-5)
    output: Tensor = func(*args, **kwargs)
    x: Tensor = given["input"].detach()

    def scale_gradients(g: Tensor) -> Tensor:
        rows = wide(x).reshape(x.shape[0], given["num_groups"], -1)
        return _over_positions(_standardised(rows, given["eps"]).view(x.shape).mul_(g))

    _affine(capture, output, given, scale_gradients, _over_positions)
    return output


def instance_norm(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rule for `F.instance_norm`."""
    given = bind(_INSTANCE, args, kwargs)
    output: Tensor = func(*args, **kwargs)
    x: Tensor = given["input"].detach()
    if not given["use_input_stats"]:
        mean, var = given["running_mean"].clone(), given["running_var"].clone()

    def scale_gradients(g: Tensor) -> Tensor:
        if given["use_input_stats"]:
            return _over_positions(
                _standardised(wide(x).flatten(2), given["eps"]).view(x.shape).mul_(g)
            )
        scale = _by_channel((var + given["eps"]).rsqrt(), x)
        return _over_positions((wide(x) - _by_channel(mean, x)).mul_(scale).mul_(g))

    _affine(capture, output, given, scale_gradients, _over_positions)
    return output


def prelu(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rule for `F.prelu`: the gradient of the slope is Σₚ gₚ min(xₚ, 0)."""
    given = bind(("input", "weight"), args, kwargs)
    x: Tensor = given["input"]
    weight = capture.tracker.target(given["weight"])
    if weight is None or capture.tracker.is_constant(x):
        return capture.other(func, args, kwargs)
    capture.tracker.check_examples(x.shape[0], weight)
    output: Tensor = func(*args, **kwargs)
    use, data = capture.use(weight), x.detach()

    def arrived(gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            slopes = wide(gradient) * wide(data).clamp(max=0)
            if weight.numel() == 1:
                slopes = slopes.flatten(1).sum(1, keepdim=True)
            elif slopes.dim() > 2:
                slopes = slopes.flatten(2).sum(2)
            use.arrived(VectorRecord(weight, slopes.view(-1, *weight.shape)))

    output.register_hook(arrived)
    return output
