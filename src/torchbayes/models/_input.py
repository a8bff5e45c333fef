"""Checks of a model's constructor arguments and of its inputs."""

from __future__ import annotations

from torch import Tensor


def require_positive(**values: int) -> None:
    """Raise `ValueError` for the first argument that is not an integer of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def require_images(images: Tensor, in_channels: int) -> None:
    """Raise `ValueError` if `images` is not a batch of `in_channels`-channel images."""
    if images.dim() != 4 or images.shape[1] != in_channels:
        raise ValueError(
            f"expected a batch of images of shape (batch, {in_channels}, height, width), got "
            f"{tuple(images.shape)}: reshape the batch or build the model with another in_channels"
        )
