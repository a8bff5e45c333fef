"""Inputs a network should be uncertain about: another data set, or a generated stand-in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from torchbayes.core.digest import digest
from torchbayes.data.dataset import DataSet, Split
from torchbayes.data.datasets import DATASETS
from torchbayes.data.images import read_images
from torchbayes.data.table_encoding import NumberColumn, TableEncoding

__all__ = ["OutOfDistribution", "noise_for", "ood_for", "shuffle_patches"]

_GRIDS = (4, 5, 3, 7, 2)
_STREAMED = 2000


@dataclass(frozen=True, eq=False)
class OutOfDistribution:
    """Inputs for scoring out-of-distribution detection, in the format of the data set.

    Args:
        name: Name of their data set, or of how they were generated.
        inputs: The inputs, before normalisation.
        note: Description for the report.
    """

    name: str
    inputs: Tensor
    note: str

    @cached_property
    def digest(self) -> str:
        """Digest of the inputs."""
        return digest(self.inputs)


def ood_for(data: DataSet, data_dir: str | Path | None = None) -> OutOfDistribution:
    """Return inputs of `data`'s shape that are not from its distribution.

    They are the test split of the usual partner data set (MNIST and Fashion-MNIST, CIFAR-10 and
    SVHN) if it is on this machine; nothing is downloaded. Otherwise they are derived from the test
    split:

    - images: `patch-shuffled`, each cut into a grid whose tiles are permuted at random. Every image
      keeps its own pixels and strokes, so brightness and contrast reveal nothing, but it no longer
      shows an object;
    - tables: `far rows`, whose numbers lie 4 to 6 standard deviations from the mean (the root of the mean
      square over the columns) and whose levels come from random rows; without columns of numbers,
      `shuffled rows`, with every column in an order of its own;
    - other inputs: `far points`, in random directions at 4 to 6 standard deviations from the mean.

    Both are fixed: every call returns the same inputs.

    Args:
        data: Data set that a network was trained on.
        data_dir: Folder with the partner's files; by default the one named by TORCHBAYES_DATA.

    Example:
        >>> from torchbayes.data import load_data
        >>> ood_for(load_data("digits")).name
        'patch-shuffled'
    """
    entry = DATASETS.get(data.name)
    partner = None if entry is None or entry.ood is None else DATASETS[entry.ood]
    if partner is not None and partner.available(data_dir):
        other = partner.load(data_dir, False)
        if other.shape == data.shape and isinstance(other.test, Split):
            return OutOfDistribution(
                partner.name, other.test.inputs, f"the test split of {partner.name}"
            )
    generator = torch.Generator().manual_seed(0)
    inputs = _test_inputs(data)
    if len(data.shape) == 3:
        return OutOfDistribution(
            "patch-shuffled",
            shuffle_patches(inputs, generator),
            f"the test images of {data.name}, each with the tiles of a grid in random order "
            "(a stand-in made without another data set)",
        )
    if data.encoding is not None:
        return _far_rows(inputs, data.encoding, data.name, generator)
    direction = torch.randn(inputs.shape, generator=generator)
    direction /= direction.flatten(1).norm(dim=1).view(-1, *[1] * (inputs.dim() - 1))
    radius = 4 + 2 * torch.rand(len(inputs), *[1] * (inputs.dim() - 1), generator=generator)
    return OutOfDistribution(
        "far points",
        (inputs.mean(0) + inputs.std(0) * radius * direction).to(inputs.dtype),
        f"points 4 to 6 standard deviations from the mean of {data.name} "
        "(a stand-in made without another data set)",
    )


def _far_rows(
    inputs: Tensor, encoding: TableEncoding, name: str, generator: torch.Generator
) -> OutOfDistribution:
    """Return rows with numbers that no row has, and levels that rows do have."""
    count, far, start = len(inputs), inputs.clone(), 0
    numbers: list[int] = []
    for column in encoding.columns:
        # The inputs of a column belong together: a row has one level.
        width = len(column.inputs)
        other = torch.randperm(count, generator=generator)
        far[:, start : start + width] = inputs[other, start : start + width]
        if isinstance(column, NumberColumn) and column.std > 0:
            numbers.append(start)
        start += width
    if not numbers:
        return OutOfDistribution(
            "shuffled rows",
            far,
            f"the test rows of {name}, each column in a random order of its own (a stand-in made without "
            "another data set)",
        )
    direction = torch.randn(count, len(numbers), generator=generator)
    direction *= math.sqrt(len(numbers)) / direction.norm(dim=1, keepdim=True)
    radius = 4 + 2 * torch.rand(count, 1, generator=generator)
    far[:, numbers] = radius * direction
    return OutOfDistribution(
        "far rows",
        far,
        f"rows whose numbers lie 4 to 6 standard deviations from the means of {name} (a stand-in made "
        "without another data set)",
    )


def noise_for(data: DataSet, count: int = 2000) -> OutOfDistribution | None:
    """Return images of `data`'s shape that show nothing: independent pixels, uniform from 0 to 255.

    They are fixed: every call returns the same ones. For data that are not images, return None.

    Args:
        data: Data set that a network was trained on.
        count: Number of images.

    Example:
        >>> from torchbayes.data import load_data
        >>> noise_for(load_data("digits"), 5).inputs.shape
        torch.Size([5, 1, 8, 8])
    """
    if len(data.shape) != 3:
        return None
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, *data.shape), generator=generator, dtype=torch.uint8)
    return OutOfDistribution("noise", images, "independent pixels, uniform from black to white")


def shuffle_patches(images: Tensor, generator: torch.Generator) -> Tensor:
    """Permute the tiles of each image at random, so that no image stays as it is.

    The grid is 4 × 4 if that divides the size, else 5, 3, 7 or 2 tiles per side, else pixels.

    Args:
        images: Shape (examples, channels, height, width).
        generator: Random generator of the permutations.
    """
    count, channels, height, width = images.shape
    grid = next((g for g in _GRIDS if height % g == 0 and width % g == 0), None)
    rows, columns = (height, width) if grid is None else (grid, grid)
    tiles = images.view(count, channels, rows, height // rows, columns, width // columns)
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = torch.rand(count, rows * columns, generator=generator).argsort(1)
    still = (order == torch.arange(rows * columns)).all(1)
    order[still] = order[still].roll(1, 1)
    tiles = tiles[torch.arange(count)[:, None], order]
    tiles = tiles.view(count, rows, columns, *tiles.shape[2:]).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(images.shape)


def _test_inputs(data: DataSet) -> Tensor:
    if isinstance(data.test, Split):
        return data.test.inputs
    step = -(-len(data.test) // _STREAMED)
    paths = [data.test.path(index) for index in range(0, len(data.test), step)]
    return read_images(paths, data.test.shape)
