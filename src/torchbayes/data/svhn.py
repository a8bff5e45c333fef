"""SVHN, cropped digits (Netzer et al. 2011): 32 × 32 colour images in MATLAB files."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from torchbayes.core.errors import FileError
from torchbayes.core.reading import check_inflation
from torchbayes.data.dataset import DataSet, Split
from torchbayes.data.source import DataError, RemoteFile, Source, damaged, obtain
from torchbayes.data.transform import PadCropFlip

__all__ = ["SVHN", "load_svhn", "read_svhn"]

_COMPRESSED, _PIECE = 15, 1 << 20  # a kind of element of MATLAB files, version 5

_FILES = ("train_32x32.mat", "test_32x32.mat")
_CHECKSUMS = (
    "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
)

SVHN = Source(
    "svhn",
    ("svhn", "SVHN"),
    tuple((name,) for name in _FILES),
    tuple(
        RemoteFile(name, checksum, (f"http://ufldl.stanford.edu/housenumbers/{name}",))
        for name, checksum in zip(_FILES, _CHECKSUMS, strict=True)
    ),
)


def load_svhn(data_dir: str | Path | None, download: bool) -> DataSet:
    """Load SVHN's cropped digits (without the `extra` images)."""
    folder = obtain(SVHN, data_dir, download)
    train, test = (read_svhn(folder / name) for name in _FILES)
    return DataSet(
        name="svhn",
        train=train,
        test=test,
        validation=None,
        classes=tuple("0123456789"),
        shape=(3, 32, 32),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        # A mirrored digit is not a digit.
        augment=PadCropFlip(pad=4, flip=False),
        note=f"MATLAB files from {folder}",
    )


def read_svhn(path: Path) -> Split:
    """Read `X` (32 × 32 × 3 × n) and `y` (1 to 10, where 10 stands for the digit 0).

    Raises:
        DataError: If the file is truncated, damaged or of another format.
    """
    from scipy.io import loadmat  # late: SciPy is slow to import

    try:
        _check_bomb(path)
        content = loadmat(path, variable_names=("X", "y"))
        images, labels = content["X"], content["y"].reshape(-1)
    except FileError:
        raise
    # loadmat passes on any error of its parser: struct.error, zlib.error, TypeError, ...
    except Exception as error:
        raise damaged(path, error) from error
    if images.shape[:3] != (32, 32, 3) or images.ndim != 4 or images.dtype != np.uint8:
        raise DataError(
            f"{path} has images of shape {images.shape} and type {images.dtype}, not uint8 of "
            "(32, 32, 3, n): get the cropped version of SVHN"
        )
    if len(labels) != images.shape[3] or len(labels) == 0:
        raise DataError(
            f"{path} has {images.shape[3]} images but {len(labels)} labels: get it again"
        )
    numbers = torch.from_numpy(labels.astype(np.int64))
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    return Split(pixels, torch.where(numbers == 10, 0, numbers))


def _check_bomb(path: Path) -> None:
    """Inflate a MATLAB file piece by piece, keep nothing, and raise a `FileError` where it is too much."""
    inflated = 0
    with path.open("rb") as file:
        order = {b"IM": "<", b"MI": ">"}.get(file.read(128)[126:])
        while order is not None and len(tag := file.read(8)) == 8:
            kind, left = struct.unpack(f"{order}II", tag)
            if kind != _COMPRESSED:
                file.seek(left, 1)
                continue
            stream = zlib.decompressobj()
            while left and (piece := file.read(min(left, _PIECE))):
                left -= len(piece)
                while piece:
                    inflated += len(stream.decompress(piece, _PIECE))
                    check_inflation(path, inflated)
                    piece = stream.unconsumed_tail
