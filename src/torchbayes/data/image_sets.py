"""Data sets from a folder of images: splits, image size, and whether to stream."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torchbayes.data.dataset import DataSet, Split
from torchbayes.data.folder import ImageFolder, class_folders, list_images
from torchbayes.data.images import probe, read_images
from torchbayes.data.source import DataError
from torchbayes.data.transform import PadCropFlip

__all__ = ["STREAM_ABOVE", "load_folder"]

STREAM_ABOVE = 2**30
"""Bytes of decoded images above which a folder is streamed instead of held in memory."""

_LARGEST_SIDE = 224
_PROBED = 64

# ImageNet's constants, which pretrained networks expect too; the grey ones are their mean.
_MEAN = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_STD = {3: (0.229, 0.224, 0.225), 1: (0.226,)}


def load_folder(path: str | Path, *, size: int | None, stream: bool | None) -> DataSet:
    """Build a data set from a folder with a subfolder of images for each class.

    The class subfolders are either in `path` itself, in which case a fixed fifth of every class is
    the test split, or in its `train` and `test` (or `val`) subfolders. With all three of `train`,
    `val` and `test`, `val` is the validation split.

    Args:
        path: Folder of images.
        size: Side of the square that images are resized to; None takes the median shorter side of
            the images, at most 224.
        stream: Whether images are decoded each time they are used (True) or once, into memory
            (False); None decides by `STREAM_ABOVE`.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"the image folder {root} does not exist: check the path")
    if size is not None and size < 1:
        raise ValueError(f"the image size is {size}: expected 1 or more")
    parts = _parts(root)
    classes = class_folders(root / parts["train"])
    if len(classes) < 2:
        raise DataError(
            f"{root / parts['train']} has {len(classes)} class subfolders: put the images of each "
            "class into a subfolder of its own, at least two"
        )
    listed = {part: list_images(root, where, classes) for part, where in parts.items()}
    files, targets = listed["train"]
    missing = set(range(len(classes))) - set(targets.tolist())
    if missing:
        raise DataError(
            f"{root / parts['train'] / classes[min(missing)]} has no images: "
            "add some or remove that subfolder"
        )
    step = max(1, len(files) // _PROBED)
    train = ImageFolder(root, files, targets, (1, 1, 1))
    channels, side = probe([train.path(i) for i in range(0, len(files), step)])
    if size is None:
        size = min(side, _LARGEST_SIDE)
    shape = (channels, size, size)
    sources = {part: ImageFolder(root, *listing, shape) for part, listing in listed.items()}
    if "test" not in sources:
        kept, held = _fixed_fifth(targets, len(classes))
        whole = sources["train"]
        sources = {"train": whole.subset(kept), "test": whole.subset(held)}
    examples = sum(len(source) for source in sources.values())
    if stream is None:
        stream = examples * channels * size * size > STREAM_ABOVE
    splits = {part: s if stream else _decoded(s) for part, s in sources.items()}
    return DataSet(
        name=f"folder:{path}",
        train=splits["train"],
        test=splits["test"],
        validation=splits.get("validation"),
        classes=classes,
        shape=shape,
        mean=_MEAN[channels],
        std=_STD[channels],
        augment=PadCropFlip(pad=size // 8),
        note=f"{examples} images of {root}, {'streamed' if stream else 'in memory'}, "
        f"cropped to squares and resized to {size} × {size}",
    )


def _parts(root: Path) -> dict[str, str]:
    """Return the subfolder of each split in `root`."""

    def first(*names: str) -> str | None:
        return next((n for n in names if (root / n).is_dir() and class_folders(root / n)), None)

    names = {"train": ("train",), "validation": ("val", "valid", "validation"), "test": ("test",)}
    parts = {part: found for part, known in names.items() if (found := first(*known))}
    if "train" not in parts:
        if (root / "train").is_dir() and any((root / name).is_dir() for name in ("test", "val")):
            raise DataError(
                f"{root / 'train'} has no class subfolders: put the images of each class into a "
                "subfolder of its own"
            )
        return {"train": ""}
    if "test" not in parts and "validation" in parts:
        parts["test"] = parts.pop("validation")
    if "test" not in parts:
        raise DataError(
            f"{root} has a folder 'train' but no folder 'test' or 'val' with class subfolders: "
            "add one, or pass the 'train' folder itself to hold out a fifth of it"
        )
    return parts


def _fixed_fifth(targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Split every class 4 : 1, independently of the seed of a run."""
    generator = torch.Generator().manual_seed(0)
    held = []
    for number in range(classes):
        members = (targets == number).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        count = min(max(1, round(0.2 * len(members))), len(members) - 1)
        held.append(members[order[:count]])
    test = torch.cat(held).sort().values
    if len(test) == 0:
        raise DataError(
            "no class of this image folder has two images, so none can be held out for testing: "
            "add images"
        )
    train = torch.ones(len(targets), dtype=torch.bool)
    train[test] = False
    return train.nonzero().squeeze(1), test


def _decoded(source: ImageFolder) -> Split:
    paths = [source.path(i) for i in range(len(source))]
    return Split(read_images(paths, source.shape), source.targets)
