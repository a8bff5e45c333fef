"""Test images under shift: six kinds of corruption at five severities, generated on demand.

After Hendrycks & Dietterich (2019), "Benchmarking neural network robustness to common corruptions and
perturbations", for images of any size and number of channels. These are not the files of CIFAR-10-C:
kinds and severities follow the idea, with strengths relative to the image's side or range of values, so
that an 8 × 8 digit and a 32 × 32 photograph are affected alike. Results are therefore labelled as
generated.

Every call returns the same images: noise is drawn from a separate generator.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CORRUPTIONS", "CORRUPTION_NOTE", "SEVERITIES", "corrupt"]

SEVERITIES = (1, 2, 3, 4, 5)
CORRUPTION_NOTE = (
    "Corruptions are generated on demand, after Hendrycks & Dietterich (2019); they are not the published "
    "files of a -C data set, and figures are not comparable with theirs."
)

_NOISE_STD = (0.08, 0.14, 0.22, 0.32, 0.45)
_BLUR_SHARE = (0.04, 0.055, 0.07, 0.09, 0.12)  # std of the Gaussian, relative to the image's side
_CONTRAST = (0.6, 0.45, 0.3, 0.2, 0.12)
_PIXELATE_SHARE = (0.75, 0.62, 0.5, 0.38, 0.25)  # blocks left, relative to the side's pixels
_JPEG_QUALITY = (40, 25, 15, 10, 6)
_DEGREES = (10, 20, 30, 45, 60)


def corrupt(images: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupt images.

    Args:
        images: (examples, channels, height, width), uint8 or floating point in [0, 1].
        kind: One of `CORRUPTIONS`.
        severity: 1 (mild) to 5 (severe).
        seed: Random seed; the same seed gives the same images.

    Returns:
        Corrupted images of the same shape and type.

    Example:
        >>> grey = torch.full((2, 1, 8, 8), 0.5)
        >>> float(corrupt(grey, "noise", 5).std()) > float(corrupt(grey, "noise", 1).std()) > 0
        True
    """
    if kind not in CORRUPTIONS:
        raise ValueError(f"unknown corruption {kind!r}: choose one of {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity}: expected a whole number from 1 to 5")
    if images.dim() != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise ValueError(
            f"cannot corrupt a {images.dtype} tensor of shape {tuple(images.shape)}: give uint8 or "
            "floating-point images of shape (examples, channels, height, width)"
        )
    if len(images) == 0:
        return images.clone()
    whole = images.dtype == torch.uint8
    unit = images.float() / 255 if whole else images.float()
    generator = torch.Generator().manual_seed(1000 * seed + severity)
    result = CORRUPTIONS[kind](unit, severity - 1, generator).clamp(0, 1)
    return (result * 255).round().to(torch.uint8) if whole else result.to(images.dtype)


def _noise(images: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Add independent Gaussian noise to every pixel."""
    return images + _NOISE_STD[level] * torch.randn(images.shape, generator=generator)


def _blur(images: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Apply a Gaussian blur, one direction after the other, with replicated edges."""
    for dim in (2, 3):
        side = images.shape[dim]
        std = _BLUR_SHARE[level] * side
        reach = max(1, math.ceil(3 * std))
        kernel = torch.exp(-torch.arange(-reach, reach + 1).square() / (2 * std**2))
        kernel /= kernel.sum()
        pad = (0, 0, reach, reach) if dim == 2 else (reach, reach, 0, 0)
        shape = (1, 1, -1, 1) if dim == 2 else (1, 1, 1, -1)
        flat = F.pad(images.flatten(0, 1).unsqueeze(1), pad, mode="replicate")
        images = F.conv2d(flat, kernel.view(shape)).view(images.shape)
    return images


def _contrast(images: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Pull values towards the image's own mean."""
    return torch.lerp(images.mean((2, 3), keepdim=True), images, _CONTRAST[level])


def _pixelate(images: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Replace every pixel with the mean of its block."""
    for dim in (2, 3):
        side = images.shape[dim]
        blocks = max(1, round(_PIXELATE_SHARE[level] * side))
        block = torch.arange(side) * blocks // side
        together = (block[:, None] == block).float()
        images = (images.movedim(dim, 3) @ (together / together.sum(0))).movedim(3, dim)
    return images


def _jpeg(images: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Compress with Pillow and decode again; channels that are not RGB one by one."""
    from PIL import Image

    colour = images.shape[1] == 3
    planes = images.permute(0, 2, 3, 1) if colour else images.flatten(0, 1)
    pixels = (planes * 255).round().to(torch.uint8).numpy()
    read = np.empty_like(pixels)
    for index, picture in enumerate(pixels):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=_JPEG_QUALITY[level])
        file.seek(0)
        with Image.open(file) as opened:
            read[index] = np.asarray(opened)
    result = torch.from_numpy(read).float() / 255
    return result.permute(0, 3, 1, 2) if colour else result.view(images.shape)


def _rotation(images: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Rotate about the centre, half of the images each way, filling with black."""
    turn = torch.randint(2, (len(images),), generator=generator) * 2.0 - 1
    angle = turn * math.radians(_DEGREES[level])
    height, width = images.shape[2:]
    cos, sin, none = angle.cos(), angle.sin(), torch.zeros(len(images))
    # affine_grid works in units of half a side: without the ratio a wide image would be sheared.
    rows = [
        torch.stack([cos, -sin * height / width, none], 1),
        torch.stack([sin * width / height, cos, none], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "pixelate": _pixelate,
    "jpeg": _jpeg,
    "rotation": _rotation,
}
"""The corruptions, each a function of images in [0, 1], a level from 0 to 4 and a generator."""
