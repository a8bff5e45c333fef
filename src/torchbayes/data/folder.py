"""Folders of images with one subfolder per class: the files and their class numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchbayes.core.digest import digest
from torchbayes.data.images import read_image
from torchbayes.data.source import DataError

__all__ = ["ImageFolder", "class_folders", "list_images"]

_EXTENSIONS = (
    ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip

_READ = 1000


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """A map-style data set of image files on disk, decoded on access.

    Args:
        root: The folder.
        files: Paths relative to `root`, as an array of bytes. (A million Python strings would be
            copied, page by page, into every worker process.)
        targets: Class number of each file.
        shape: Channels, height and width of every decoded image.
        random_crop: Whether each access takes a new random window; see `random_crops`.
    """

    root: Path
    files: npt.NDArray[np.bytes_]
    targets: Tensor
    shape: tuple[int, int, int]
    random_crop: bool = False

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = read_image(self.path(index), self.shape, random_crop=self.random_crop)
        return image, self.targets[index]

    def path(self, index: int) -> Path:
        """Return the path of one image file."""
        return self.root / os.fsdecode(bytes(self.files[index]))

    def subset(self, index: Tensor) -> ImageFolder:
        """Return the examples at `index`, in its order."""
        return replace(self, files=self.files[index.numpy()], targets=self.targets[index])

    def digest(self) -> str:
        """Return a digest of the paths, class numbers and sizes of all files, and of what is in some of them.

        Reading a large data set would take minutes: of more than a thousand files, only some are read.
        """
        paths = [self.path(index) for index in range(len(self))]
        step = -(-len(paths) // _READ)
        try:
            sizes = [path.stat().st_size for path in paths]
            read = [digest(path.read_bytes()) for path in paths[::step]]
        except OSError as error:
            raise DataError(
                f"{error.filename} cannot be read ({error.strerror}): restore it, or leave it out"
            ) from error
        return digest(self.files.tobytes(), self.targets, self.shape, sizes, read)

    def random_crops(self) -> ImageFolder:
        """Return the same images, cropped to a new random window at each access, as for ImageNet.

        Windows are drawn from torch's global generator, which `StreamLoader` seeds for each example.
        """
        return replace(self, random_crop=True)


def class_folders(folder: Path) -> tuple[str, ...]:
    """List the class subfolders of `folder`, in the order of their class numbers."""
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    return tuple(sorted(name for name in names if not name.startswith(".")))


def list_images(
    root: Path, part: str, classes: tuple[str, ...]
) -> tuple[npt.NDArray[np.bytes_], Tensor]:
    """List the image files of a split and their class numbers, in a fixed order.

    Args:
        root: The data set's folder.
        part: Subfolder of the split, or "" for `root` itself.
        classes: Names of the class subfolders.
    """
    unknown = sorted(set(class_folders(root / part)) - set(classes))
    if unknown:
        raise DataError(
            f"{root / part} has a class {unknown[0]!r} that the training images do not have: "
            "rename or remove that subfolder"
        )
    files: list[bytes] = []
    targets: list[int] = []
    for number, name in enumerate(classes):
        for folder, _, names in sorted(os.walk(root / part / name)):
            inside = os.path.relpath(folder, root)
            for file in sorted(names):
                if file.lower().endswith(_EXTENSIONS) and not file.startswith("."):
                    files.append(os.fsencode(os.path.join(inside, file)))
                    targets.append(number)
    if not files:
        raise DataError(
            f"{root / part} has no images in its class subfolders (known endings: "
            f"{', '.join(_EXTENSIONS)}): put the images of each class into a subfolder of its own"
        )
    return np.array(files), torch.tensor(targets)
