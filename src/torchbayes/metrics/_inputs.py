"""Checks of the inputs of metrics; every function returns detached tensors on the CPU.

On the CPU because float64 and deterministic cumulative sums are always available there, and because
a score then does not depend on the device that made the predictions.
"""

import torch
from torch import Tensor


def real(value: Tensor, name: str) -> Tensor:
    """Return `value` detached on the CPU; raise if it is not a real tensor or contains NaN."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}: use torch.as_tensor"
        )
    if value.is_complex():
        raise TypeError(f"{name} must be real, got {value.dtype}: pass a real tensor")
    value = value.detach().cpu()
    if value.is_floating_point() and bool(value.isnan().any()):
        raise ValueError(
            f"{name} contains NaN, expected numbers: check that training did not diverge"
        )
    return value


def probabilities(probs: Tensor, name: str = "probs") -> Tensor:
    """Return `probs` (N, C) in its own dtype, checked to have a distribution in every row."""
    probs = real(probs, name)
    shape = tuple(probs.shape)
    if probs.ndim != 2 or shape[1] < 2:
        raise ValueError(
            f"{name} must have shape (N, C) with C >= 2 classes, got {shape}: "
            "give a binary classifier two columns, 1 - p and p"
        )
    if shape[0] == 0:
        raise ValueError(f"{name} has shape {shape}, expected at least one row to score")
    if not probs.is_floating_point():
        raise TypeError(
            f"{name} must be floating point, got {probs.dtype}: pass probabilities, not labels"
        )
    # Rounding each entry to bfloat16 alone moves a row's sum by up to eps / 2 = 0.004.
    tolerance = max(1e-3, torch.finfo(probs.dtype).eps)
    sums = probs.sum(dim=1, dtype=torch.float64)
    # Written so that an infinite entry (whose row may sum to NaN) fails too.
    bad = ~((sums - 1).abs() <= tolerance)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"row {row} of {name} sums to {float(sums[row]):.6g}, expected 1: "
            "if these are logits, apply softmax first"
        )
    lowest = float(probs.min())
    if lowest < 0:
        raise ValueError(
            f"{name} contains the negative value {lowest:.6g}, expected probabilities in [0, 1]"
        )
    return probs


def labelled(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked `probs` (N, C) and int64 `targets` (N,) with labels in [0, C)."""
    probs = probabilities(probs)
    targets = real(targets, "targets")
    examples, classes = probs.shape
    if targets.is_floating_point():
        raise TypeError(
            f"targets must be integer class labels, got {targets.dtype}: convert with .long()"
        )
    if tuple(targets.shape) != (examples,):
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, expected ({examples},) to match probs "
            f"{tuple(probs.shape)}: pass one integer label per row"
        )
    targets = targets.long()
    outside = (targets < 0) | (targets >= classes)
    if bool(outside.any()):
        raise ValueError(
            f"targets contains the label {int(targets[outside][0])}, expected labels 0 to "
            f"{classes - 1}: remove or remap such rows"
        )
    return probs, targets


def scores(values: Tensor, name: str) -> Tensor:
    """Return `values` (N,) in float64; infinities are allowed because only the order matters."""
    values = real(values, name)
    if values.ndim != 1:
        raise ValueError(
            f"{name} must have shape (N,), got {tuple(values.shape)}: pass one score per example"
        )
    return values.double()


def finite(values: Tensor, name: str) -> Tensor:
    """Return `values` of any non-empty shape in float64, without infinities."""
    values = real(values, name).double()
    if values.numel() == 0:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, expected at least one number to score"
        )
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"{name} contains an infinite value, expected finite numbers: "
            "check that training did not diverge"
        )
    return values


def same_shape(values: Tensor, name: str, other: Tensor, other_name: str) -> None:
    """Raise unless both shapes are equal: (N, 1) against (N,) would broadcast to (N, N)."""
    if values.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and {other_name} {tuple(other.shape)}, "
            "expected equal shapes: reshape one of them"
        )
