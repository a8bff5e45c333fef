"""The distributions p(z) of a hypernetwork's input noise (Ukai et al. 2019, section 4.2).

A latent is any function of a size and a generator that returns a vector of that size. The paper's four
have names here, so that a posterior that uses one of them can be saved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["LATENTS", "Latent", "half_normal", "normal", "uniform", "uniform_positive"]

Latent = Callable[[int, "torch.Generator | None"], Tensor]


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def normal(size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw from N(0, 1): the paper's choice for averaging several draws.

    Example:
        >>> normal(32).shape
        torch.Size([32])
    """
    return torch.randn(size, generator=generator, device=_device(generator))


def uniform(size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw from U(−1, 1)."""
    return uniform_positive(size, generator) * 2 - 1


def uniform_positive(size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw from U(0, 1): the paper's choice for a single draw, with little diversity between draws."""
    return torch.rand(size, generator=generator, device=_device(generator))


def half_normal(size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw from |N(0, 1)|."""
    return normal(size, generator).abs()


LATENTS: dict[str, Latent] = {
    "normal": normal,
    "uniform": uniform,
    "uniform-positive": uniform_positive,
    "half-normal": half_normal,
}
