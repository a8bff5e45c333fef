"""The registry of data sets, and the loader for each."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchbayes.data.builtin import load_curve, load_digits, load_moons
from torchbayes.data.cifar import CIFAR10, load_cifar10
from torchbayes.data.dataset import DataSet, Split, hold_out
from torchbayes.data.folder import ImageFolder
from torchbayes.data.image_sets import load_folder
from torchbayes.data.loader import BatchLoader
from torchbayes.data.mnist import FASHION_MNIST, MNIST, load_fashion_mnist, load_mnist
from torchbayes.data.source import Source, find
from torchbayes.data.stream import StreamLoader
from torchbayes.data.svhn import SVHN, load_svhn
from torchbayes.data.table import TEST_SHARE, load_table
from torchbayes.data.table_encoding import TableEncoding
from torchbayes.data.transform import Chain, Normalise, Transform
from torchbayes.data.uci import GAL, UCI, load_uci

__all__ = ["DATASETS", "DataEntry", "load_data", "make_loader"]


@dataclass(frozen=True)
class DataEntry:
    """An entry of the data-set registry.

    Args:
        name: Name in `load_data` and on the command line.
        summary: One-line description.
        homepage: Address of the publication.
        load: Loader; called with the data folder and whether to download.
        source: Files of the data set, or None if it needs none.
        ood: Name of the data set usually taken as out of distribution, or None.
    """

    name: str
    summary: str
    homepage: str
    load: Callable[[str | Path | None, bool], DataSet]
    source: Source | None = None
    ood: str | None = None

    def available(self, data_dir: str | Path | None = None) -> bool:
        """Whether the data are on this machine, so that loading needs no download."""
        return self.source is None or find(self.source, data_dir) is not None


def _load_uci(name: str, data_dir: str | Path | None, download: bool) -> DataSet:
    return load_uci(name, data_dir)


_SKLEARN = "https://scikit-learn.org/stable/datasets.html"

DATASETS: dict[str, DataEntry] = {
    entry.name: entry
    for entry in (
        DataEntry(
            "digits", "1,797 handwritten digits, 8 × 8 grey; comes with scikit-learn",
            _SKLEARN, load_digits,
        ),
        DataEntry(
            "moons", "1,000 points in the plane, two interleaved half circles", _SKLEARN, load_moons
        ),
        DataEntry(
            "bbb-curve", "2,000 points of a noisy curve, the regression of Bayes by Backprop",
            "https://arxiv.org/abs/1505.05424", load_curve,
        ),
        DataEntry(
            "mnist", "70,000 handwritten digits, 28 × 28 grey",
            "https://yann.lecun.com/exdb/mnist/", load_mnist, MNIST, ood="fashion-mnist",
        ),
        DataEntry(
            "fashion-mnist", "70,000 pictures of clothing, 28 × 28 grey",
            "https://github.com/zalandoresearch/fashion-mnist",
            load_fashion_mnist, FASHION_MNIST, ood="mnist",
        ),
        DataEntry(
            "cifar10", "60,000 photographs in ten classes, 32 × 32 colour",
            "https://www.cs.toronto.edu/~kriz/cifar.html", load_cifar10, CIFAR10, ood="svhn",
        ),
        DataEntry(
            "svhn", "99,289 house numbers, 32 × 32 colour",
            "http://ufldl.stanford.edu/housenumbers/", load_svhn, SVHN, ood="cifar10",
        ),
        *(
            DataEntry(
                name, "UCI table for regression, random test rows" if name == "uci:airfoil"
                else "UCI table for regression with Gal's splits",
                GAL, partial(_load_uci, name), source,
            )
            for name, source in UCI.items()
        ),
    )
}  # fmt: skip


def load_data(
    name: str, *, data_dir: str | Path | None = None, download: bool = True,
    validation: float | int = 0.0, seed: int = 0,
    size: int | None = None, stream: bool | None = None,
    target: str | int | None = None, task: str | None = None, drop: Sequence[str | int] = (),
    split: str | int | Path | None = None, test_share: float | None = None,
    encoding: TableEncoding | None = None,
) -> DataSet:  # fmt: skip
    """Load a data set by name, or build one from a folder of images or a table.

    Args:
        name: A name in `DATASETS`, `table:FILE` for a table in a text file, `folder:PATH`, or the path
            of a folder with a subfolder of images for each class (or with such `train` and `test` or `val`
            folders).
        data_dir: Folder that already has the files; by default the one named by TORCHBAYES_DATA.
            Data sets it does not have are taken from the cache of earlier downloads.
        download: Whether files missing on this machine may be downloaded (to the cache).
        validation: Training examples to hold out: a number (int) or a fraction (float).
        seed: Seed of the choice of held-out examples.
        size: For a folder: side that images are resized to; None derives it from the images.
        stream: For a folder: whether images are decoded at each use; None decides by their total size.
        target: For a table: column to predict, by its name, or by its number from 0 or, negative, from the
            end; None for the last one.
        task: For a table: classification or regression; None finds it from the target.
        drop: For a table: columns to leave out.
        split: For a table: seed of the random choice of test rows, or a file with their numbers from 0;
            for `uci:…`, the number of the published split. None is 0, `"seed"` is the value of `seed`.
        test_share: For a table: share of the rows to test on, 0.2 if None.
        encoding: For a table: encoding of an earlier run, to use instead of fitting one.

    Raises:
        ValueError: If no data set has that name.
        DataError: If the files are missing or damaged.

    Example:
        >>> data = load_data("digits", validation=0.1)
        >>> data.train_size, len(data.validation), len(data.test), data.shape
        (1212, 135, 450, (1, 8, 8))
    """
    folders = {"size": size, "stream": stream}
    tables = {"target": target, "task": task, "drop": drop or None, "test_share": test_share}
    which = seed if split == "seed" else 0 if split is None else split
    entry = DATASETS.get(name)
    if name.startswith("table:"):
        _refuse(name, "folders of images", folders)
        data = load_table(
            name.removeprefix("table:"), target=target, task=task, drop=drop, split=which,
            test_share=TEST_SHARE if test_share is None else test_share, encoding=encoding,
        )  # fmt: skip
    elif name in UCI:
        _refuse(name, "folders of images", folders)
        _refuse(name, "tables of your own", tables)
        data = load_uci(name, data_dir, split=str(which), encoding=encoding)
    elif entry is not None:
        _refuse(name, "folders of images", folders)
        _refuse(name, "tables", tables | {"split": split})
        data = entry.load(data_dir, download)
    elif name.startswith("folder:") or os.sep in name or Path(name).is_dir():
        if Path(name).is_file():
            raise ValueError(f"{name} is a file: give table:{name} for a table")
        _refuse(name, "tables", tables | {"split": split})
        data = load_folder(name.removeprefix("folder:"), size=size, stream=stream)
    else:
        near = difflib.get_close_matches(name.lower(), DATASETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}" if near else f"the names are {', '.join(DATASETS)}"
        if Path(name).is_file():
            hint = f"for the file of that name give table:{name}"
        raise ValueError(
            f"there is no data set {name!r}: {hint}, or give folder:PATH for a folder of images, table:FILE "
            "for a table"
        )
    return hold_out(data, validation, seed)


def _refuse(name: str, kind: str, options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(
                f"{option}={value} is for {kind} and {name!r} is not one: leave it out"
            )


def make_loader(
    data: DataSet, split: Split | ImageFolder, batch_size: int, *,
    shuffle: bool = False, augment: bool = False, seed: int = 0,
    drop_last: bool = False, rank: int = 0, world_size: int = 1, workers: int = 2,
) -> BatchLoader | StreamLoader:  # fmt: skip
    """Build the loader of a split, normalising with the data set's constants.

    Args:
        data: The data set.
        split: One of its splits; in memory it gets a `BatchLoader`, on disk a `StreamLoader`.
        batch_size: Examples per (global) batch.
        shuffle: Whether to draw a new random order for each epoch.
        augment: Whether to apply the data set's usual augmentation, if it has one.
        seed: Seed of order and augmentation.
        drop_last: Whether to drop an incomplete last batch.
        rank: Rank of this process.
        world_size: Number of processes that share each batch.
        workers: Number of worker processes of a `StreamLoader`.

    Example:
        >>> data = load_data("digits")
        >>> loader = make_loader(data, data.train, 64, shuffle=True)
        >>> len(loader), next(iter(loader))[0].shape
        (22, torch.Size([64, 1, 8, 8]))
    """
    transform: Transform = Normalise(data.mean, data.std)
    if augment and data.augment is not None:
        transform = Chain(data.augment, transform)
    loader = (
        partial(StreamLoader, split, workers=workers)
        if isinstance(split, ImageFolder)
        else partial(BatchLoader, split.inputs, split.targets)
    )
    return loader(
        batch_size, shuffle=shuffle, seed=seed, transform=transform,
        drop_last=drop_last, rank=rank, world_size=world_size,
    )  # fmt: skip
