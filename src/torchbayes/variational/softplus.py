"""σ = softplus(ρ): how a standard deviation is kept above 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchbayes import kernels

__all__ = ["bounds", "inverse_softplus", "softplus"]


def softplus(rho: Tensor, out: Tensor, slope: Tensor, scratch: Tensor) -> None:
    """Write σ = log(1 + exp ρ) to `out` and dσ/dρ to `slope`.

    ρ is held where neither exp ρ nor σ leaves the type's range: σ is never 0 and the slope never NaN.

    Args:
        rho: ρ.
        out: For σ.
        slope: For dσ/dρ = exp ρ / (1 + exp ρ).
        scratch: To be overwritten.
    """
    low, high = bounds(rho.dtype)
    if kernels.fits([[out], [slope], [rho]], None):
        kernels.run(kernels.Loop.SOFTPLUS, [[out], [slope], [rho]], (low, high))
        return
    if rho.device.type == "cpu" and _between(rho, low, high):
        torch.exp(rho, out=slope)  # reading ρ twice costs less than writing it once more
    else:
        torch.clamp(rho, low, high, out=slope).exp_()
    torch.log1p(slope, out=out)
    slope.div_(torch.add(slope, 1, out=scratch))


def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Where ρ is held: the least and the greatest."""
    limits = torch.finfo(dtype)
    return math.log(limits.tiny) + 0.01, 0.9 * math.log(limits.max)


def _between(tensor: Tensor, low: float, high: float) -> bool:
    if not tensor.numel():
        return True
    least, most = tensor.aminmax()
    return float(least) >= low and float(most) <= high


def inverse_softplus(std: Tensor) -> Tensor:
    """The ρ whose softplus is `std`: log(exp σ − 1), without overflow."""
    return std + torch.log(-torch.expm1(-std))
