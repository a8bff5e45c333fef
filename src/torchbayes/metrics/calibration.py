"""Reliability curve and calibration errors of the top label (Guo et al. 2017, arXiv:1706.04599).

Bin i of B is the interval (edges[i], edges[i + 1]]; the first also includes its left edge, so a
confidence of exactly 0 is in the first bin and one of exactly 1 in the last.

Equal-mass edges are themselves confidences, chosen so that each bin has N / B examples, the first
N mod B one more. Equal confidences are never split, because the result would then depend on the
order of rows: with many ties (a saturated network) bins are unequal and some are empty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchbayes.metrics import _inputs
from torchbayes.metrics.classification import confidence, correct


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Confidence against accuracy in B bins, all float64 except `count`.

    Attributes:
        confidence: Mean confidence in each bin (B,), NaN if empty.
        accuracy: Accuracy in each bin (B,), NaN if empty.
        count: Number of examples in each bin (B,), int64.
        edges: Ascending bin edges (B + 1,) from 0 to 1, in the precision of `probs`.
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor
    edges: Tensor


def reliability_curve(
    probs: Tensor, targets: Tensor, bins: int = 15, equal_mass: bool = False
) -> ReliabilityCurve:
    """Compute the points of a reliability diagram: accuracy and confidence, binned by confidence.

    Args:
        probs: Class probabilities (N, C).
        targets: Integer labels (N,).
        bins: Number of bins B.
        equal_mass: Whether bins have equal counts (the ATMC paper plots 8 such) or equal widths.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.2, 0.8], [0.1, 0.9], [0.7, 0.3]], dtype=torch.float64)
        >>> curve = reliability_curve(probs, torch.tensor([1, 0, 0]), bins=4)
        >>> curve.count.tolist(), curve.accuracy.tolist()
        ([0, 0, 1, 2], [nan, nan, 1.0, 0.5])
    """
    probs, targets = _inputs.labelled(probs, targets)
    return binned(probs, correct(probs, targets), bins, equal_mass)


def ece(probs: Tensor, targets: Tensor, bins: int = 15, equal_mass: bool = False) -> float:
    """Compute the expected calibration error: the mean over examples of |accuracy - confidence| of their bin.

    Args:
        probs: Class probabilities (N, C).
        targets: Integer labels (N,).
        bins: Number of bins.
        equal_mass: Whether bins have equal counts or equal widths.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.05, 0.95], [0.0, 1.0]])
        >>> round(ece(probs, torch.tensor([1, 0]), bins=10), 4)
        0.475
    """
    return mean_gap(reliability_curve(probs, targets, bins, equal_mass))


def mce(probs: Tensor, targets: Tensor, bins: int = 15, equal_mass: bool = False) -> float:
    """Compute the maximum calibration error: the largest |accuracy - confidence| of a non-empty bin.

    The arguments are those of `ece`.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
        >>> mce(probs, torch.tensor([1, 1]), bins=2)
        0.5
    """
    return largest_gap(reliability_curve(probs, targets, bins, equal_mass))


def binned(probs: Tensor, hit: Tensor, bins: int, equal_mass: bool) -> ReliabilityCurve:
    """Return the curve of checked `probs` (N, C) whose predictions are right where `hit` (N,)."""
    if bins < 1:
        raise ValueError(f"bins is {bins}, expected at least 1: use 15 for the usual score")
    level = confidence(probs)
    # Edges are rounded like the confidences, so that one stored as float32(0.8) is in (0.7, 0.8].
    edges = (torch.arange(bins + 1, dtype=torch.float64) / bins).to(probs.dtype).double()
    if equal_mass:
        inner = torch.arange(1, bins)
        cut = inner * (len(level) // bins) + inner.clamp(max=len(level) % bins)
        edges[1:-1] = level.sort().values[cut - 1]
    index = torch.bucketize(level, edges[1:-1])
    count = torch.bincount(index, minlength=bins)
    return ReliabilityCurve(
        confidence=torch.bincount(index, level, minlength=bins) / count,
        accuracy=torch.bincount(index, hit.double(), minlength=bins) / count,
        count=count,
        edges=edges,
    )


def mean_gap(curve: ReliabilityCurve) -> float:
    """Return the mean of |accuracy - confidence| over examples."""
    return float(_gaps(curve) @ curve.count.double()) / int(curve.count.sum())


def largest_gap(curve: ReliabilityCurve) -> float:
    """Return the largest |accuracy - confidence| of a bin."""
    return float(_gaps(curve).max())


def _gaps(curve: ReliabilityCurve) -> Tensor:
    """Return |accuracy - confidence| of each bin (B,), 0 if empty."""
    return (curve.accuracy - curve.confidence).abs().nan_to_num(nan=0.0)
