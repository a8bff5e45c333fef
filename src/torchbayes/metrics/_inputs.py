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
    """Return `probs` (N, C) in its own dtype, checked to have a distribution in every row.

    Maps (N, C, …) become a row for each position.
    """
    probs = real(probs, name)
    if probs.ndim > 2:
        probs = probs.movedim(1, -1).flatten(0, -2)
    shape = tuple(probs.shape)
    if probs.ndim != 2 or shape[1] < 2:
        raise ValueError(
            f"{name} must have shape (N, C) with C >= 2 classes, got {shape}: "
            "give a binary classifier two columns, 1 - p and p, or use binary_scores"
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
    """Return checked `probs` (N, C) and int64 `targets` (N,) with labels in [0, C).

    Maps (N, C, …) and (N, …) become a row for each position.
    """
    given = tuple(probs.shape) if isinstance(probs, Tensor) else ()
    probs = probabilities(probs)
    targets = real(targets, "targets")
    if len(given) > 2 and tuple(targets.shape) == (given[0], *given[2:]):
        targets = targets.flatten()
    examples, classes = probs.shape
    if targets.is_floating_point():
        raise TypeError(
            f"targets must be integer class labels, got {targets.dtype}: convert with .long()"
        )
    if tuple(targets.shape) != (examples,):
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, expected {(given[0], *given[2:])} to match probs "
            f"{given}: pass one integer label per row"
        )
    targets = targets.long()
    outside = (targets < 0) | (targets >= classes)
    if bool(outside.any()):
        raise ValueError(
            f"targets contains the label {int(targets[outside][0])}, expected labels 0 to "
            f"{classes - 1}: remove or remap such rows; rows(probs, targets, ignore_index=…) removes them"
        )
    return probs, targets


def rows(probs: Tensor, targets: Tensor, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Return one row of probabilities (M, C) and one label (M,) for each position that is not ignored.

    All scores of classes take the result: `accuracy(*rows(probs, targets, ignore_index=255))`.

    Args:
        probs: Class probabilities (N, C, …).
        targets: Integer labels (N, …).
        ignore_index: Label of positions to leave out, or None.

    Example:
        >>> import torch
        >>> probs = torch.full((2, 3, 4, 4), 1 / 3)
        >>> labels = torch.zeros(2, 4, 4, dtype=torch.long)
        >>> labels[0] = 255
        >>> [part.shape for part in rows(probs, labels, ignore_index=255)]
        [torch.Size([16, 3]), torch.Size([16])]
    """
    if ignore_index is None:
        return labelled(probs, targets)
    known = real(targets, "targets") != ignore_index
    checked, _ = labelled(probs, torch.where(known, real(targets, "targets"), 0))
    return checked[known.flatten()], real(targets, "targets")[known].long()


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
