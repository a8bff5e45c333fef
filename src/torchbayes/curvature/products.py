"""Sums over examples of matrix products and of their squares, without a tensor of all products.

Σᵢ LᵢRᵢ and Σᵢ (LᵢRᵢ)², the square entry by entry, for the per-example gradients LᵢRᵢ of a layer. What costs
time is memory traffic: products are made in kept buffers that fit into a cache, all examples' at once where
the matrix is small, a few rows of one example's where it is large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchbayes.core.workspace import Workspace

__all__ = ["CHUNK", "LARGE", "add_products"]

CHUNK = 2**20
"""Numbers that a kept buffer holds, unless one example needs more."""

LARGE = 2**17
"""Entries from which a matrix is taken row by row."""

_TILE = 2**18


def add_products(
    left: Tensor, right: Tensor, sums: Tensor, squares: Tensor, fresh: bool, scratch: Workspace
) -> None:
    """Add Σᵢ LᵢRᵢ to `sums` and Σᵢ (LᵢRᵢ)² to `squares`, or overwrite both if they are fresh.

    Args:
        left: Of shape (examples, rows, inner).
        right: Of shape (examples, inner, columns).
        sums: Of shape (rows, columns).
        squares: Of shape (rows, columns).
        fresh: Whether to overwrite.
        scratch: Where to find buffers.
    """
    examples, rows, columns = left.shape[0], left.shape[1], right.shape[2]
    if rows * columns > LARGE:
        height = max(1, _TILE // columns)
        for top in range(0, rows, height):
            part = slice(top, min(top + height, rows))
            total, square = sums[part], squares[part]
            product = scratch.get("product", total.shape, left)
            for i in range(examples):
                if fresh and i == 0:
                    torch.mm(left[0, part], right[0], out=total)
                    torch.mul(total, total, out=square)
                else:
                    torch.mm(left[i, part], right[i], out=product)
                    total.add_(product)
                    square.addcmul_(product, product)
        return
    step = max(1, CHUNK // (rows * columns))
    for start in range(0, examples, step):
        stop = min(start + step, examples)
        product = scratch.get("product", (stop - start, rows, columns), left)
        torch.bmm(left[start:stop], right[start:stop], out=product)
        if fresh and start == 0:
            torch.sum(product, 0, out=sums)
            torch.sum(product.mul_(product), 0, out=squares)
        else:
            sums.add_(product.sum(0))
            squares.add_(product.mul_(product).sum(0))
