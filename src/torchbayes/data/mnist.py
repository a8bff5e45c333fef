"""MNIST (LeCun et al. 1998) and Fashion-MNIST (Xiao et al. 2017): 28 × 28 grey, ten classes."""

from __future__ import annotations

from pathlib import Path

from torchbayes.data.dataset import DataSet, Split
from torchbayes.data.idx import read_idx
from torchbayes.data.source import DataError, RemoteFile, Source, obtain

__all__ = ["FASHION_MNIST", "MNIST", "load_fashion_mnist", "load_mnist"]

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _source(
    name: str, folders: tuple[str, ...], mirrors: tuple[str, ...], checksums: tuple[str, ...]
) -> Source:
    remote = tuple(
        RemoteFile(f"{file}.gz", checksum, tuple(f"{mirror}{file}.gz" for mirror in mirrors))
        for file, checksum in zip(_FILES, checksums, strict=True)
    )
    return Source(name, folders, tuple((f"{file}.gz", file) for file in _FILES), remote)


MNIST = _source(
    "mnist",
    ("mnist", "MNIST", "MNIST/raw"),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)

FASHION_MNIST = _source(
    "fashion-mnist",
    ("fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)

_GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def load_mnist(data_dir: str | Path | None, download: bool) -> DataSet:
    """Load MNIST."""
    return _load(obtain(MNIST, data_dir, download), "mnist", tuple("0123456789"), 0.1307, 0.3081)


def load_fashion_mnist(data_dir: str | Path | None, download: bool) -> DataSet:
    """Load Fashion-MNIST."""
    folder = obtain(FASHION_MNIST, data_dir, download)
    return _load(folder, "fashion-mnist", _GARMENTS, 0.2860, 0.3530)


def _load(folder: Path, name: str, classes: tuple[str, ...], mean: float, std: float) -> DataSet:
    train, test = (_split(folder, images, labels) for images, labels in (_FILES[:2], _FILES[2:]))
    return DataSet(
        name=name,
        train=train,
        test=test,
        validation=None,
        classes=classes,
        shape=(1, 28, 28),
        mean=(mean,),
        std=(std,),
        note=f"IDX files from {folder}",
    )


def _split(folder: Path, images: str, labels: str) -> Split:
    paths = [
        path if path.is_file() else path.with_suffix("")
        for path in (folder / f"{images}.gz", folder / f"{labels}.gz")
    ]
    pixels, numbers = (read_idx(path) for path in paths)
    if pixels.shape[1:] != (28, 28) or numbers.dim() != 1 or len(pixels) != len(numbers):
        raise DataError(
            f"{paths[0]} and {paths[1]} have shapes {tuple(pixels.shape)} and "
            f"{tuple(numbers.shape)}, not (n, 28, 28) and (n,): get both files again"
        )
    return Split(pixels.unsqueeze(1), numbers.long())
