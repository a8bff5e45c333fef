"""Input tensors as small PNG pictures embedded in the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["data_uri", "value_range"]


def value_range(pictures: npt.NDArray[Any]) -> tuple[float, float]:
    """Return the values to show as black and white.

    These are 0 and 255 for bytes, 0 and 1 for floating-point images, and the extremes of normalised ones.

    Args:
        pictures: (examples, channels, height, width).

    Example:
        >>> value_range(np.zeros((1, 1, 2, 2), np.uint8)), value_range(np.full((1, 1, 2, 2), -3.0))
        ((0.0, 255.0), (-3.0, -2.0))
    """
    if pictures.dtype == np.uint8:
        return 0.0, 255.0
    values = pictures[np.isfinite(pictures)]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return low, high if high > low else low + 1


def data_uri(picture: npt.NDArray[Any], limits: tuple[float, float]) -> str:
    """Encode one picture as a data URI.

    Args:
        picture: (channels, height, width); three channels are colour, any other number is averaged.
        limits: Values of black and white.
    """
    low, high = limits
    scaled = np.nan_to_num((picture.astype(np.float64) - low) / (high - low), nan=0.0)
    levels = np.round(255 * np.clip(scaled, 0, 1))
    pixels = np.moveaxis(levels, 0, -1) if len(levels) == 3 else levels.mean(0)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
