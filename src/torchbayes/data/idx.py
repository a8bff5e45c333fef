"""The IDX format of MNIST: a magic number, big-endian sizes, then plain bytes; often gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from torchbayes.core.reading import check_inflation
from torchbayes.data.source import DataError, damaged

__all__ = ["read_idx"]

_PIECE = 1 << 20
_DEFLATE = 1032  # the most that gzip can shrink anything


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in .gz.

    Raises:
        DataError: If the file is truncated, damaged or of another format.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = _read(file, path)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != 8:  # the type code of uint8
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes: remove it and get the original"
        )
    header = _header(data)
    sizes = struct.unpack_from(f">{data[3]}I", data, 4) if len(data) >= header else (0,)
    if len(data) < header or len(data) - header != math.prod(sizes):
        raise DataError(
            f"{path} has {max(0, len(data) - header)} bytes of data where its header promises "
            f"{math.prod(sizes)}: it is damaged or half-downloaded, so remove it and get it again"
        )
    if math.prod(sizes) == 0:
        raise DataError(f"{path} has no examples: remove it and get the original")
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).view(sizes)


def _header(data: bytearray) -> int:
    """Return the length of the header: four bytes, and four for each dimension."""
    return 4 + 4 * data[3]


def _read(file: IO[bytes] | gzip.GzipFile, path: Path) -> bytearray:
    """Read what the header promises and one byte more, in pieces: a bomb goes off no further.

    A header that tells the truth may itself be a bomb's.
    """
    data = bytearray(file.read(4))
    if len(data) < 4:
        return data
    data += file.read(_header(data) - 4)
    if len(data) < _header(data):
        return data
    sizes = struct.unpack_from(f">{data[3]}I", data, 4)
    promised = min(math.prod(sizes), _DEFLATE * path.stat().st_size)
    if isinstance(file, gzip.GzipFile):
        check_inflation(path, promised)
    while promised >= 0 and (piece := file.read(min(_PIECE, promised + 1))):
        data += piece
        promised -= len(piece)
    return data
