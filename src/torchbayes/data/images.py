"""Decoding of image files into tensors of one size."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor

from torchbayes.data.source import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["read_image", "read_images"]

Box = tuple[float, float, float, float]

_MOST_PIXELS = 80_000_000  # below the number at which Pillow itself begins to warn
# Those of the endings that a folder of images may have. None of their readers starts another program, as
# that of EPS does; Pillow goes by the content of a file, whatever its name.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")


def read_image(
    path: str | Path | BinaryIO, shape: tuple[int, ...], *, random_crop: bool = False,
    formats: tuple[str, ...] = _FORMATS, most_pixels: int = _MOST_PIXELS,
) -> Tensor:  # fmt: skip
    """Decode an image file into uint8 of shape (channels, height, width).

    The largest centred window of the right proportions is resized to the shape (bilinear, with
    antialiasing); colours are converted to grey if `shape` has one channel.

    Args:
        path: File, or its content as an open file.
        shape: Channels (1 or 3), height and width of the result.
        random_crop: Take a window of 8 % to 100 % of the area at proportions from 3:4 to 4:3
            instead (Szegedy et al. 2015, section 6), drawn from torch's global generator.
        formats: Pillow's names of the formats to accept, whatever the file is called. The readers of some
            others start programs.
        most_pixels: Largest number of pixels to accept.
    """
    from PIL import Image

    channels, height, width = shape
    with _opened(path, formats, most_pixels) as image:
        if not random_crop and image.format == "JPEG":
            # Lets the decoder skip detail that the resize would discard.
            image.draft(None, (2 * width, 2 * height))
        image = _converted(image, channels)
        box = _random_box(*image.size) if random_crop else _centre_box(*image.size, width / height)
        if image.size != (width, height) or random_crop:
            image = image.resize((width, height), Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1).contiguous()


def read_images(paths: Sequence[str | Path], shape: tuple[int, ...]) -> Tensor:
    """Decode image files into one uint8 tensor, on all cores, with a progress bar."""
    from rich.console import Console
    from rich.progress import track

    images = torch.empty((len(paths), *shape), dtype=torch.uint8)
    console = Console(stderr=True)
    with ThreadPoolExecutor() as pool:
        try:
            decoded = pool.map(lambda path: read_image(path, shape), paths)
            bar = track(
                decoded, "Reading images", total=len(paths),
                console=console, transient=True, disable=not console.is_terminal,
            )  # fmt: skip
            for number, image in enumerate(bar):
                images[number] = image
        finally:
            # After an error, do not decode the rest of a large folder first.
            pool.shutdown(cancel_futures=True)
    return images


def probe(paths: Sequence[str | Path]) -> tuple[int, int]:
    """Read image headers; return 1 channel if all are grey, else 3, and the median shorter side."""
    grey, sides = True, []
    for path in paths:
        with _opened(path) as image:
            grey = grey and (image.mode in ("1", "L") or image.mode.startswith("I"))
            sides.append(min(image.size))
    return (1 if grey else 3), sorted(sides)[len(sides) // 2]


class _Bounded(io.BufferedReader):
    """A file of which never more is read than it has: a damaged one may claim gigabytes."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(io.FileIO(path))
        self._size = Path(path).stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


@contextmanager
def _opened(
    path: str | Path | BinaryIO,
    formats: tuple[str, ...] = _FORMATS,
    most_pixels: int = _MOST_PIXELS,
) -> Iterator[Image]:
    """Open an image; raise `DataError` if it cannot be opened, or decoded within the block."""
    from PIL import Image, UnidentifiedImageError

    name = path if isinstance(path, (str, Path)) else "that was sent"
    try:
        with ExitStack() as held:
            file = held.enter_context(_Bounded(path)) if isinstance(path, (str, Path)) else path
            image = held.enter_context(Image.open(file, formats=formats))
            if image.width * image.height > most_pixels:
                raise ValueError(
                    f"{image.width} × {image.height} pixels are more than {most_pixels:,}"
                )
            yield image
    except FileNotFoundError:
        raise DataError(f"the image {name} does not exist: check the path") from None
    except (
        OSError, ValueError, SyntaxError, EOFError,
        Image.DecompressionBombError, Image.DecompressionBombWarning,
    ) as error:  # fmt: skip
        reason = str(error).rstrip(".")
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is in none of the formats {', '.join(formats)}"
        raise DataError(
            f"the image {name} could not be read ({reason}): replace or remove the file"
        ) from None


def _converted(image: Image, channels: int) -> Image:
    from PIL.Image import fromarray

    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow's own conversion clips at 255 instead of scaling.
        levels = np.asarray(image).astype(np.int64)
        image = fromarray((levels >> 8 if levels.max() > 255 else levels).astype(np.uint8))
    if image.mode == "P":
        # A palette with transparency must be converted via RGBA.
        image = image.convert("RGBA")
    return image.convert(mode)


def _centre_box(width: int, height: int, proportion: float) -> Box:
    across = min(float(width), height * proportion)
    down = min(float(height), width / proportion)
    left, top = (width - across) / 2, (height - down) / 2
    return left, top, left + across, top + down


def _random_box(width: int, height: int) -> Box:
    for _ in range(10):
        area, shift, x, y = torch.rand(4).tolist()
        proportion = (4 / 3) ** (2 * shift - 1)
        area = (0.08 + 0.92 * area) * width * height
        across, down = math.sqrt(area * proportion), math.sqrt(area / proportion)
        if across <= width and down <= height:
            left, top = x * (width - across), y * (height - down)
            return left, top, left + across, top + down
    return _centre_box(width, height, 1.0)
