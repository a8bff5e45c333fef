"""σ = softplus(ρ): keeps a standard deviation above 0."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["bounds", "inverse_softplus", "softplus"]


def softplus(std: Tensor, slope: Tensor, rho: Tensor, *, low: float, high: float) -> None:
    """Write σ = log(1 + exp ρ) to `std` and dσ/dρ = exp ρ / (1 + exp ρ) to `slope`.

    ρ is clamped to `low` … `high`, where neither exp ρ nor σ leaves the type's range (`bounds`): σ is never 0
    and the slope never NaN.
    """
    if rho.device.type == "cpu" and _between(rho, low, high):
        torch.exp(rho, out=slope)  # reading ρ twice costs less than writing it once more
    else:
        torch.clamp(rho, low, high, out=slope).exp_()
    torch.log1p(slope, out=std)
    slope.div_(slope + 1)


def bounds(dtype: torch.dtype) -> dict[str, Any]:
    """Return the range that ρ is clamped to: `low` and `high`."""
    limits = torch.finfo(dtype)
    return {"low": math.log(limits.tiny) + 0.01, "high": 0.9 * math.log(limits.max)}


def _between(tensor: Tensor, low: float, high: float) -> bool:
    if not tensor.numel():
        return True
    least, most = tensor.aminmax()
    return float(least) >= low and float(most) <= high


def inverse_softplus(std: Tensor) -> Tensor:
    """Return the ρ whose softplus is `std`: log(exp σ − 1), without overflow."""
    return std + torch.log(-torch.expm1(-std))
