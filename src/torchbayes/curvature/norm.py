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
    normalised: Callable[[], Tensor],
    feature_dims: int | None,
) -> None:
    """Hook `output` for the gradients of a scale and a shift.

    Args:
        capture: The capture.
        output: The layer's output.
        given: Its arguments, `weight` and `bias` among them.
        normalised: Gives x̂, in the shape of the output.
        feature_dims: The number of trailing dimensions that have a scale per entry; None if it is
            dimension 1 that has.
    """
    weight, bias = capture.target(given["weight"]), capture.target(given.get("bias"))
    first = bias if weight is None else weight
    if first is None:
        return
    batch = capture.sequence_batch
    capture.check_examples(output.shape[0 if batch is None else 1], first)
    weight_use = None if weight is None else capture.use(weight)
    bias_use = None if bias is None else capture.use(bias)

    def summed(values: Tensor, shape: torch.Size) -> Tensor:
        if feature_dims is None:
            return values.flatten(2).sum(2) if values.dim() > 2 else values
        rows = (
            values.flatten(1, values.dim() - feature_dims - 1)
            if values.dim() > feature_dims + 1
            else None
        )
        return (values if rows is None else rows.sum(1)).view(-1, *shape)

    def arrived(gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            g = wide(gradient)
            if weight_use is not None:
                target = weight_use.target
                weight_use.arrived(VectorRecord(target, summed(normalised() * g, target.shape)))
            if bias_use is not None:
                target = bias_use.target
                bias_use.arrived(VectorRecord(target, summed(g, target.shape)))

    output.register_hook(arrived)


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
        var, mean = torch.var_mean(wide(x), [d for d in range(x.dim()) if d != 1], correction=0)
    else:
        mean, var = given["running_mean"].clone(), given["running_var"].clone()

    def normalised() -> Tensor:
        scale = _by_channel((var + given["eps"]).rsqrt(), x)
        return (wide(x) - _by_channel(mean, x)).mul_(scale)

    _affine(capture, output, given, normalised, None)
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

    def normalised() -> Tensor:
        rows = wide(x).flatten(x.dim() - dims)
        return _standardised(rows, given["eps"]).view(x.shape)

    _affine(capture, output, given, normalised, dims)
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

    def normalised() -> Tensor:
        rows = wide(x).flatten(x.dim() - dims)
        eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
        return (rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()).view(x.shape)

    _affine(capture, output, given, normalised, dims)
    return output


def group_norm(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rule for `F.group_norm`."""
    names = ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")
    given = bind(names, args, kwargs, weight=None, bias=None, eps=1e-5)
    output: Tensor = func(*args, **kwargs)
    x: Tensor = given["input"].detach()

    def normalised() -> Tensor:
        rows = wide(x).reshape(x.shape[0], given["num_groups"], -1)
        return _standardised(rows, given["eps"]).view(x.shape)

    _affine(capture, output, given, normalised, None)
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

    def normalised() -> Tensor:
        if given["use_input_stats"]:
            return _standardised(wide(x).flatten(2), given["eps"]).view(x.shape)
        scale = _by_channel((var + given["eps"]).rsqrt(), x)
        return (wide(x) - _by_channel(mean, x)) * scale

    _affine(capture, output, given, normalised, None)
    return output


def prelu(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rule for `F.prelu`: the gradient of the slope is Σₚ gₚ min(xₚ, 0)."""
    given = bind(("input", "weight"), args, kwargs)
    x: Tensor = given["input"]
    weight = capture.target(given["weight"])
    if weight is None or capture.is_constant(x):
        return capture.other(func, args, kwargs)
    capture.check_examples(x.shape[0], weight)
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
