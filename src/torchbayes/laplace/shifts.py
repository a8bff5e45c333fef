"""Σ a aᵀ over the 3 × 3 patches a of images, without the patches.

For a convolution of stride 1 whose padding of 1 keeps the images' size, the product of a patch's entries at
places k and k', summed over the output's positions t, is Σₜ x[t + k] x[t + k']ᵀ. If t went over all of the
plane, it would depend on the shift k' − k alone: of the 81 products, 13 are different ones, and the others
are these or their transposes. Positions just outside the image, which are too many, are subtracted. They are
four edges, from which one row or column of the image is seen:

    Σ_{t inside} = R(k' − k) − Σ_{t on an edge},      R(d) = Σᵤ x[u] x[u + d]ᵀ
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchbayes.core.workspace import Workspace
from torchbayes.curvature.conv import ConvRecord, Geometry

__all__ = ["PRODUCTS", "add_products_of_shifts", "is_plain", "patch_products"]

_PLAIN = Geometry([1, 1], [1, 1], [1, 1], 1)
# Of a shift (y, x) and its opposite, the one that comes later in memory.
_SHIFTS = [(0, dx) for dx in range(3)] + [(dy, dx) for dy in (1, 2) for dx in range(-2, 3)]
PRODUCTS = len(_SHIFTS) + 4 * 9
"""Matrices of channels × channels that are summed up: R(d), and nine for every edge."""


def is_plain(record: ConvRecord) -> bool:
    """Whether a use is a 3 × 3 convolution of stride 1 and padding 1."""
    return record.target.shape[2:] == (3, 3) and record.geometry == _PLAIN and not record.swapped


def add_products_of_shifts(x: Tensor, total: Tensor, scratch: Workspace) -> None:
    """Add a batch to the sums that `patch_products` takes.

    Args:
        x: Images, (examples, channels, height, width).
        total: The sums, (`PRODUCTS`, channels, channels).
        scratch: Source of buffers.
    """
    examples, channels, height, width = x.shape
    # With two rows and two columns of zeros after each image, a shift is a distance in memory.
    step = width + 2
    size = examples * (height + 2) * step
    flat = scratch.get("shifts", [channels, size + 2 * step + 2], x).zero_()
    images = flat[:, :size].view(channels, examples, height + 2, step)
    images[:, :, :height, :width].copy_(x.transpose(0, 1))
    for (dy, dx), product in zip(_SHIFTS, total, strict=False):
        start = dy * step + dx
        product.addmm_(flat[:, :size], flat[:, start : start + size].t())
    edges = total[len(_SHIFTS) :].view(4, 3, 3, channels, channels)
    for edge, row in zip(edges[:2], (0, height - 1), strict=True):
        edge += _along(x[:, :, row], range(-1, width + 1))
    for edge, column in zip(edges[2:], (0, width - 1), strict=True):
        edge += _along(x[:, :, :, column], range(height))


def _along(line: Tensor, centres: range) -> Tensor:
    """Return Σ over positions of products of three neighbours of a line, (3, 3, channels, channels).

    Args:
        line: A row or column of the images, (examples, channels, entries).
        centres: The positions' places along the line.
    """
    channels = line.shape[1]
    padded = torch.nn.functional.pad(line, (2, 2))
    first, count = centres.start + 1, len(centres)
    seen = torch.stack([padded[:, :, first + k : first + k + count] for k in range(3)])
    rows = seen.transpose(1, 2).reshape(3 * channels, -1)  # place and channel; example and position
    return (rows @ rows.t()).view(3, channels, 3, channels).transpose(1, 2)


def patch_products(total: Tensor) -> Tensor:
    """Return Σ a aᵀ, whose rows are in the order of a weight's: channel, y, x.

    Args:
        total: The sums, (`PRODUCTS`, channels, channels).
    """
    channels = total.shape[1]
    result = total.new_empty(channels, 3, 3, channels, 3, 3)
    places = result.permute(1, 2, 4, 5, 0, 3)  # place k, place k', channels
    for (dy, dx), product in zip(_SHIFTS, total, strict=False):
        for y in range(3 - dy):
            for left in range(max(0, -dx), 3 - max(0, dx)):
                places[y, left, y + dy, left + dx] = product
                places[y + dy, left + dx, y, left] = product.t()
    # What is seen from above the image is at the places 2 of y, and so on.
    above, below, before, behind = total[len(_SHIFTS) :].view(4, 3, 3, channels, channels)
    places[2, :, 2, :] -= above
    places[0, :, 0, :] -= below
    places[:, 2, :, 2] -= before
    places[:, 0, :, 0] -= behind
    return result.view(9 * channels, 9 * channels)
