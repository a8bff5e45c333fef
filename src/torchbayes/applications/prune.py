"""Prune weights by signal-to-noise ratio, and compute the distribution of that ratio.

C. Blundell et al., Weight Uncertainty in Neural Networks, ICML 2015, section 5.1 and figures 3 and 4. A
weight's signal-to-noise ratio is |μ|/σ; in decibels, as in the paper's figures, 10 log₁₀(|μ|/σ).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchbayes.posterior import Gaussian

__all__ = ["SignalToNoise", "prune", "signal_to_noise"]


def _ratios(posterior: Gaussian) -> tuple[list[str], Tensor]:
    """Return the names of the random weights, and |μ|/σ of all of them in one flat tensor."""
    if not isinstance(posterior, Gaussian):
        raise TypeError(
            f"cannot prune a {type(posterior).__name__} posterior: expected a Gaussian, such as that of "
            "MeanField"
        )
    mean, std = posterior.mean(), posterior.std()
    if not std:
        raise ValueError("the posterior has no random weights: there is nothing to prune")
    flat = torch.cat([(mean[name].abs() / std[name]).flatten().double() for name in std])
    return list(std), flat.nan_to_num_(nan=0.0, posinf=float("inf"))  # 0/0 is a pruned weight


def prune(posterior: Gaussian, fraction: float) -> Gaussian:
    """Set the given fraction of the random weights, those with the lowest |μ|/σ, to zero.

    A pruned weight has μ = 0 and σ = 0: no draw brings it back. Weights without a distribution, such as
    norm layers', are kept.

    Args:
        posterior: Gaussian over the weights.
        fraction: Share of the random weights to remove, from 0 to 1.

    Returns:
        A new posterior.

    Example:
        >>> import torch, torchbayes as tb
        >>> q = tb.Gaussian({"w": torch.tensor([1.0, 0.1, -2.0])}, {"w": torch.ones(3)})
        >>> tb.applications.prune(q, 0.34).mean()["w"]
        tensor([ 1.,  0., -2.])
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction:g}: expected a share of the weights, 0 to 1")
    names, ratios = _ratios(posterior)
    mean, std = posterior.mean(), posterior.std()
    count = round(fraction * len(ratios))
    gone = torch.zeros(len(ratios), dtype=torch.bool, device=ratios.device)
    gone[ratios.argsort(stable=True)[:count]] = True
    for name, mask in zip(names, gone.split([std[n].numel() for n in names]), strict=True):
        mask = mask.view_as(std[name]).to(std[name].device)
        mean[name].masked_fill_(mask, 0)
        std[name].masked_fill_(mask, 0)
    return Gaussian(mean, std, model_name=posterior.model_name, rest=posterior.rest)


@dataclass(frozen=True)
class SignalToNoise:
    """Distribution of the signal-to-noise ratio over a posterior's weights.

    Attributes:
        values: Ratio of each weight in dB, sorted; −∞ for a mean of 0.
        edges: Bin edges of the histogram, in dB.
        density: Share of the weights per dB in each bin.
        cdf: Share of the weights up to the upper edge of each bin.
    """

    values: Tensor
    edges: Tensor
    density: Tensor
    cdf: Tensor


def signal_to_noise(posterior: Gaussian, bins: int = 100) -> SignalToNoise:
    """Compute the signal-to-noise ratio of every random weight, with density and distribution function.

    Args:
        posterior: Gaussian over the weights.
        bins: Number of histogram bins, which span the finite values.

    Example:
        >>> import torch, torchbayes as tb
        >>> q = tb.Gaussian({"w": torch.tensor([1.0, 10.0])}, {"w": torch.ones(2)})
        >>> tb.applications.signal_to_noise(q, bins=2).values
        tensor([ 0., 10.], dtype=torch.float64)
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}: expected a whole number of at least 1")
    values = (10 * torch.log10(_ratios(posterior)[1])).sort().values.cpu()
    finite = values[torch.isfinite(values)]
    low, high = (float(finite[0]), float(finite[-1])) if len(finite) else (0.0, 0.0)
    if low == high:  # all the same: a bin needs a width
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    inside = torch.searchsorted(values, edges[1:-1], right=True)
    upto = torch.cat([inside, (values <= high).sum().reshape(1)])
    counts = torch.diff(upto, prepend=(values < low).sum().reshape(1))
    density = counts / (len(values) * (edges[1:] - edges[:-1]))
    return SignalToNoise(values, edges, density, upto / len(values))
