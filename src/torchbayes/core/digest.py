"""A digest of data: cheap enough for every run, and enough to tell other data from the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, layout, sparse_bsc, sparse_bsr, sparse_coo, sparse_csc, sparse_csr, uint8
from torch.utils._pytree import keystr, tree_flatten_with_path

__all__ = ["digest"]

_BY_ROW, _BY_COLUMN = (sparse_csr, sparse_bsr), (sparse_csc, sparse_bsc)


def digest(*values: Any) -> str:
    """Return a CRC of tensors' types, shapes and contents, and of what other values say of themselves.

    Keys of dicts count, their order does not. It tells changes and mistakes apart, not forgeries. A data set
    of 150 MB takes a tenth of a second.

    Args:
        *values: Tensors, bytes, text, numbers, None, and tuples, lists and dicts of them.

    Example:
        >>> import torch
        >>> digest(torch.arange(3)) == digest(torch.arange(3)), digest(torch.arange(3)) == digest([0, 1, 2])
        (True, False)
        >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}), digest({"a": 1}) == digest({"b": 1})
        (True, False)
    """
    crc = 0
    found, _ = tree_flatten_with_path(values, is_leaf=lambda value: value is None)
    for path, leaf in sorted(((keystr(at), leaf) for at, leaf in found), key=lambda one: one[0]):
        crc = zlib.crc32(path.encode(), crc)
        if not isinstance(leaf, Tensor):
            crc = zlib.crc32(leaf if isinstance(leaf, bytes) else f"{leaf!r};".encode(), crc)
            continue
        crc = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), crc)
        for part in _dense(leaf.detach()):
            plain = part.resolve_conj().resolve_neg().cpu().contiguous()
            crc = zlib.crc32(plain.reshape(-1).view(uint8).numpy().data, crc)
    return f"{crc:08x}"


def _dense(tensor: Tensor) -> Iterable[Tensor]:
    """Return the tensors that hold a tensor's content."""
    kind: layout = tensor.layout
    if kind is sparse_coo:
        whole = tensor.coalesce()
        return whole.indices(), whole.values()
    if kind in _BY_ROW:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if kind in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
