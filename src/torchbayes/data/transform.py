"""Normalisation and augmentation of whole batches, for both loaders.

A transform takes a batch and a generator and returns a batch. It draws only from that generator, so
the loader that seeds it determines the augmentation of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Chain", "Normalise", "PadCropFlip", "Transform"]

Transform: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Normalise:
    """Subtract a mean and divide by a standard deviation, channel by channel.

    uint8 images are divided by 255 first, so the same mean and std, in [0, 1], serve them and
    floating-point images.

    Args:
        mean: One value per channel (dimension 1 of the batch).
        std: One positive value per channel.

    Example:
        >>> Normalise((0.5,), (0.25,))(torch.tensor([[0, 255]], dtype=torch.uint8).view(1, 1, 2))
        tensor([[[-2.,  2.]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"Normalise got {len(self.mean)} means and {len(self.std)} standard deviations: "
                "give one of each per channel"
            )
        if min(self.std) <= 0:
            raise ValueError(
                f"Normalise got the standard deviation {min(self.std)}: expected above 0"
            )

    def __call__(self, batch: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Normalise a batch of shape (examples, channels, ...)."""
        if batch.dtype != torch.uint8 and not batch.is_floating_point():
            raise TypeError(
                f"Normalise takes uint8 or floating-point batches, not {batch.dtype}: "
                "convert the inputs to one of them"
            )
        if batch.dim() < 2 or batch.shape[1] != len(self.mean):
            raise ValueError(
                f"Normalise has {len(self.mean)} channels but the batch has shape "
                f"{tuple(batch.shape)}: dimension 1 must have that many entries"
            )
        bytes_ = batch.dtype == torch.uint8
        shape = (len(self.mean),) + (1,) * (batch.dim() - 2)
        kind = torch.get_default_dtype() if bytes_ else batch.dtype
        unit = 255.0 if bytes_ else 1.0
        shift = torch.tensor(self.mean, dtype=kind).mul_(unit).view(shape)
        scale = torch.tensor(self.std, dtype=kind).mul_(unit).reciprocal_().view(shape)
        # Two passes, the first of which converts the bytes on the fly: a separate .float() would
        # be a third pass over memory.
        return torch.sub(batch, shift.to(batch.device)).mul_(scale.to(batch.device))


@dataclass(frozen=True)
class PadCropFlip:
    """Flip at random, pad with black and crop at a random place, independently for each image.

    The usual augmentation of small images (He et al. 2016, section 4.2: 4 pixels on each side, a
    32 × 32 window, a horizontal flip with probability 1/2). Apply it before normalisation, so that
    the padding is black and not the mean colour.

    Args:
        pad: Pixels added on each side.
        crop: Side of the square window; None keeps the size of the images.
        flip: Whether to flip half of the images left to right.

    Example:
        >>> images = torch.ones(2, 3, 32, 32, dtype=torch.uint8)
        >>> PadCropFlip()(images, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """

    pad: int = 4
    crop: int | None = None
    flip: bool = True

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ValueError(f"PadCropFlip got pad={self.pad}: expected 0 or more")
        if self.crop is not None and self.crop < 1:
            raise ValueError(f"PadCropFlip got crop={self.crop}: expected 1 or more")

    def __call__(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        """Augment a batch of shape (examples, channels, height, width)."""
        if batch.dim() != 4:
            raise ValueError(
                f"PadCropFlip takes images of shape (examples, channels, height, width), not "
                f"{tuple(batch.shape)}: leave the augmentation off for other data"
            )
        count, channels = batch.shape[:2]
        top, left, mirrored = self.draw(count, batch.shape[2:], generator)
        if count == 0:
            return batch.new_empty(0, channels, *self._window(batch.shape[2:]))
        which = torch.arange(count) + count * mirrored
        both = torch.cat([batch, batch.flip(3)]) if self.flip else batch
        padded = F.pad(both.index_select(0, which.to(batch.device)), (self.pad,) * 4)
        # Every row of every window is a contiguous piece of the padded batch: one copy of rows that
        # start where the draw says takes half the time of a gather of single pixels on a CPU.
        height, width = self._window(batch.shape[2:])
        tall, wide = padded.shape[2:]
        image = torch.arange(count) * channels * tall * wide + top * wide + left
        channel, row = torch.arange(channels) * tall * wide, torch.arange(height) * wide
        start = (image[:, None, None] + channel[:, None] + row).flatten().to(batch.device)
        pieces = padded.flatten().unfold(0, width, 1)
        return pieces.index_select(0, start).view(count, channels, height, width)

    def draw(
        self, count: int, size: tuple[int, ...], generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw each image's top row, left column and whether it is flipped."""
        height, width = self._window(size)
        spare = (size[0] + 2 * self.pad - height, size[1] + 2 * self.pad - width)
        if min(spare) < 0:
            raise ValueError(
                f"PadCropFlip cannot cut {self.crop} pixels from images of {size[0]} × {size[1]} "
                f"padded by {self.pad}: choose a smaller crop or a larger pad"
            )
        top = torch.randint(spare[0] + 1, (count,), generator=generator)
        left = torch.randint(spare[1] + 1, (count,), generator=generator)
        mirrored = torch.randint(2, (count,), generator=generator).bool()
        return top, left, mirrored if self.flip else torch.zeros_like(mirrored)

    def _window(self, size: tuple[int, ...]) -> tuple[int, int]:
        return (size[0], size[1]) if self.crop is None else (self.crop, self.crop)


class Chain:
    """Apply transforms one after the other, all drawing from the same generator.

    Args:
        *transforms: Transforms, in the order of application.

    Example:
        >>> chain = Chain(PadCropFlip(pad=1), Normalise((0.5,), (0.5,)))
        >>> chain(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.Generator()).dtype
        torch.float32
    """

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    def __call__(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        """Apply the transforms in order."""
        for transform in self.transforms:
            batch = transform(batch, generator)
        return batch

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.transforms))})"
