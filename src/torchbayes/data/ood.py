"""Inputs a network should not be sure about: another data set, or a stand-in made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchbayes.data.dataset import DataSet, Split
from torchbayes.data.datasets import DATASETS
from torchbayes.data.images import read_images

__all__ = ["OutOfDistribution", "noise_for", "ood_for", "shuffle_patches"]

_GRIDS = (4, 5, 3, 7, 2)
_STREAMED = 2000


@dataclass(frozen=True, eq=False)
class OutOfDistribution:
    """Inputs to score out-of-distribution detection on, in the form of the data set's own.

    Args:
        name: Name of the data set they are from, or of how they were made.
        inputs: As many as there are, before normalisation.
        note: What they are, in a sentence for the report.
    """

    name: str
    inputs: Tensor
    note: str


def ood_for(data: DataSet, data_dir: str | Path | None = None) -> OutOfDistribution:
    """Give inputs of `data`'s shape that are not from its distribution.

    The test split of the usual partner data set (MNIST and Fashion-MNIST, CIFAR-10 and SVHN) if it
    is on this machine; nothing is downloaded. Otherwise a stand-in made of the test split:

    - images: `patch-shuffled`, each cut into a grid whose tiles change places at random. Every
      image keeps its own pixels and strokes, so brightness and contrast give nothing away, but
      shows no object any more;
    - other inputs: `far points`, in random directions at 4 to 6 standard deviations from the mean.

    Both are fixed: every call gives the same inputs.

    Args:
        data: The data set that a network was trained on.
        data_dir: Folder that has the partner's files; by default what TORCHBAYES_DATA names.

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
    if len(data.shape) == 3:
        return OutOfDistribution(
            "patch-shuffled",
            shuffle_patches(_test_inputs(data), generator),
            f"the test images of {data.name}, each with the tiles of a grid in random order "
            "(a stand-in made without another data set)",
        )
    inputs = _test_inputs(data)
    direction = torch.randn(inputs.shape, generator=generator)
    direction /= direction.flatten(1).norm(dim=1).view(-1, *[1] * (inputs.dim() - 1))
    radius = 4 + 2 * torch.rand(len(inputs), *[1] * (inputs.dim() - 1), generator=generator)
    return OutOfDistribution(
        "far points",
        (inputs.mean(0) + inputs.std(0) * radius * direction).to(inputs.dtype),
        f"points 4 to 6 standard deviations from the mean of {data.name} "
        "(a stand-in made without another data set)",
    )


def noise_for(data: DataSet, count: int = 2000) -> OutOfDistribution | None:
    """Give images of `data`'s shape that show nothing: every pixel of its own, uniform from 0 to 255.

    They are fixed: every call gives the same. Data that are no images have none.

    Args:
        data: The data set that a network was trained on.
        count: How many.

    Example:
        >>> from torchbayes.data import load_data
        >>> noise_for(load_data("digits"), 5).inputs.shape
        torch.Size([5, 1, 8, 8])
    """
    if len(data.shape) != 3:
        return None
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, *data.shape), generator=generator, dtype=torch.uint8)
    return OutOfDistribution("noise", images, "every pixel of its own, uniform from black to white")


def shuffle_patches(images: Tensor, generator: torch.Generator) -> Tensor:
    """Put the tiles of each image in an order of its own that moves every image.

    The grid is 4 × 4 where that divides the size, else 5, 3, 7 or 2 tiles a side, else pixels.

    Args:
        images: Shape (examples, channels, height, width).
        generator: Source of the orders.
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
