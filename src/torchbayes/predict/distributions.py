"""Distribution and quantile functions, also of the distributions whose torch version has none.

Student's t: F(x) = ∫ of its density, an incomplete beta function. Poisson: P(k ≤ x) = Q(⌊x⌋ + 1, rate), the
regularised upper incomplete gamma function.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    Poisson,
    StudentT,
    TransformedDistribution,
)

__all__ = ["distribution_function", "is_count", "quantile_function"]


def is_count(distribution: Distribution) -> bool:
    """Whether its values are whole numbers for which these functions are known."""
    return isinstance(distribution, Poisson)


def distribution_function(distribution: Distribution, values: Tensor) -> Tensor:
    """Return P(y ≤ values)."""
    if _is_rescaled(distribution):
        for transform in reversed(distribution.transforms):
            values = transform.inv(values)
        return distribution_function(distribution.base_dist, values)
    if isinstance(distribution, Poisson):
        return torch.special.gammaincc(  # type: ignore[no-any-return]
            values.floor().double() + 1, distribution.rate.double()
        ).to(values)
    if isinstance(distribution, StudentT):
        place = (values - distribution.loc) / distribution.scale
        return _scipy("stdtr", distribution.df, place)
    return distribution.cdf(values)


def quantile_function(distribution: Distribution, q: float) -> Tensor:
    """Return the value that an observation stays below with probability `q`.

    Raises:
        NotImplementedError: If it is not known.
    """
    if _is_rescaled(distribution):
        value = quantile_function(distribution.base_dist, q)
        for transform in distribution.transforms:
            value = transform(value)
        return value
    if isinstance(distribution, Poisson):
        rate = distribution.rate
        found = _scipy("pdtrik", rate.new_tensor(q), rate).ceil().clamp_min(0).nan_to_num()
        # Rounding may lift a whole number above itself.
        below = (found - 1).clamp_min(0)
        return torch.where(distribution_function(distribution, below) >= q, below, found)
    if isinstance(distribution, StudentT):
        df = distribution.df
        return distribution.loc + distribution.scale * _scipy("stdtrit", df, df.new_tensor(q))
    return distribution.icdf(torch.tensor(q, **_like(distribution)))


def _is_rescaled(distribution: Distribution) -> TypeGuard[TransformedDistribution]:
    """Whether it is another distribution in other units, which may have the functions that torch lacks."""
    return isinstance(distribution, TransformedDistribution) and all(
        isinstance(transform, AffineTransform) and bool(torch.as_tensor(transform.scale > 0).all())
        for transform in distribution.transforms
    )


def _like(distribution: Distribution) -> dict[str, Any]:
    mean = distribution.mean
    return {"dtype": mean.dtype, "device": mean.device}


def _scipy(name: str, *arguments: Tensor) -> Tensor:
    # Imported here because SciPy takes half a second, which `import torchbayes` should not.
    from scipy import special

    result = getattr(special, name)(*(a.detach().double().cpu().numpy() for a in arguments))
    return torch.as_tensor(result).to(arguments[-1])
