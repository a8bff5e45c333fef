"""The IDX format of MNIST: a magic number, big-endian sizes, then plain bytes; often gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from torchbayes.data.source import DataError

__all__ = ["read_idx"]

_UBYTE = 8


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in .gz.

    Raises:
        DataError: If the file is cut short, damaged or something else.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as stream:
                data = bytearray(stream.read())
        else:
            data = bytearray(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged or half-downloaded ({str(error).rstrip('.')}): "
            "remove it and get it again."
        ) from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UBYTE:
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes: remove it and get the original."
        )
    header = 4 + 4 * data[3]
    sizes = struct.unpack_from(f">{data[3]}I", data, 4) if len(data) >= header else (0,)
    if len(data) < header or len(data) - header != math.prod(sizes):
        raise DataError(
            f"{path} has {max(0, len(data) - header)} bytes of data where its header promises "
            f"{math.prod(sizes)}: it is half-downloaded or damaged, so remove it and get it again."
        )
    if math.prod(sizes) == 0:
        raise DataError(f"{path} has no examples: remove it and get the original.")
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).view(sizes)
