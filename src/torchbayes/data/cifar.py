"""CIFAR-10 (Krizhevsky 2009), binary version: a label byte and 3,072 pixel bytes per image."""

from __future__ import annotations

from pathlib import Path

import torch

from torchbayes.data.dataset import DataSet, Split
from torchbayes.data.source import DataError, RemoteFile, Source, obtain
from torchbayes.data.transform import PadCropFlip

__all__ = ["CIFAR10", "load_cifar10", "read_cifar"]

_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = "test_batch.bin"
_MEMBERS = tuple(f"{_FOLDER}/{name}" for name in (*_TRAIN, _TEST))
_ARCHIVE = "cifar-10-binary.tar.gz"
_RECORD = 1 + 3 * 32 * 32
_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

CIFAR10 = Source(
    "cifar10",
    (_FOLDER, "cifar10", f"cifar10/{_FOLDER}"),
    tuple((name,) for name in (*_TRAIN, _TEST)),
    (
        RemoteFile(
            _ARCHIVE,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            (
                f"https://www.cs.toronto.edu/~kriz/{_ARCHIVE}",
                f"https://cave.cs.toronto.edu/kriz/{_ARCHIVE}",
            ),
        ),
    ),
    _MEMBERS,
)


def load_cifar10(data_dir: str | Path | None, download: bool) -> DataSet:
    """Load CIFAR-10 from its six binary files or the archive that contains them."""
    place = obtain(CIFAR10, data_dir, download)
    if place.is_dir():
        contents = {name: bytearray((place / name).read_bytes()) for name in (*_TRAIN, _TEST)}
    else:
        from torchbayes.data.download import read_members

        contents = read_members(place, _MEMBERS)
    train = [read_cifar(contents[name], place / name) for name in _TRAIN]
    return DataSet(
        name="cifar10",
        train=Split(*map(torch.cat, zip(*((s.inputs, s.targets) for s in train), strict=True))),
        test=read_cifar(contents[_TEST], place / _TEST),
        validation=None,
        classes=_CLASSES,
        shape=(3, 32, 32),
        # The constants of the VOGN experiments. The std is the customary one: the mean of the
        # images' own standard deviations, which is smaller than that of all pixels.
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        augment=PadCropFlip(pad=4),
        note=f"binary files from {place}",
    )


def read_cifar(data: bytearray, path: Path) -> Split:
    """Parse one binary file.

    Args:
        data: Contents of the file.
        path: Name of the file, for messages.

    Raises:
        DataError: If the file ends inside an image.
    """
    if len(data) == 0 or len(data) % _RECORD:
        raise DataError(
            f"{path} has {len(data)} bytes, not a whole number of {_RECORD}-byte images: it is "
            "damaged or half-downloaded, so remove it and get it again"
        )
    records = torch.frombuffer(data, dtype=torch.uint8).view(-1, _RECORD)
    return Split(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long())
