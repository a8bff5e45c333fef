"""The data set type: named splits, classes, shape and normalisation constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchbayes.core.digest import digest
from torchbayes.data.folder import ImageFolder
from torchbayes.data.source import DataError
from torchbayes.data.transform import PadCropFlip

if TYPE_CHECKING:
    from torchbayes.data.table import Table
    from torchbayes.data.table_encoding import TableEncoding

__all__ = ["DataSet", "Split", "hold_out"]


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs and targets in memory; also a map-style data set of `(input, target)` pairs.

    Args:
        inputs: uint8 images (examples, channels, height, width) or floating-point features.
        targets: One class number (int64) or value (float) per example.
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"there are {len(self.inputs)} inputs but {len(self.targets)} targets: "
                "give one target per example"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def digest(self) -> str:
        """Return a digest of all inputs and targets."""
        return digest(self.inputs, self.targets)

    def subset(self, index: Tensor) -> Split:
        """Return the examples at `index`, in its order."""
        return Split(self.inputs[index], self.targets[index])


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set ready to train and test on.

    Args:
        name: Name of the data set, as passed to `load_data`.
        train: Training examples, in memory or streamed from a folder.
        test: Test examples.
        validation: Examples held out from training, or None.
        classes: Class names in the order of their numbers; empty for regression.
        shape: Shape of one input.
        mean: Mean of the training inputs per channel, in [0, 1] for images.
        std: Standard deviation of the training inputs per channel, likewise.
        augment: The usual augmentation for these data, or None.
        truth: For a regression, the noise-free curve if it is known, or None.
        note: Origin of the data and any processing.
        table: For a table, its rows and columns, or None.
        encoding: For a table, how its columns became inputs and its target was scaled, or None.
        part_of: Digest of the data set that this is a part of, or None.
    """

    name: str
    train: Split | ImageFolder
    test: Split | ImageFolder
    validation: Split | ImageFolder | None
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: PadCropFlip | None = None
    truth: Callable[[Tensor], Tensor] | None = None
    note: str = ""
    table: Table | None = None
    encoding: TableEncoding | None = None
    part_of: str | None = None

    def __post_init__(self) -> None:
        if not self.classes:
            return
        for part in (self.train, self.validation, self.test):
            if part is None or len(part) == 0:
                continue
            low, high = int(part.targets.min()), int(part.targets.max())
            if low < 0 or high >= len(self.classes):
                raise DataError(
                    f"data set {self.name!r} has the label {low if low < 0 else high}, but its "
                    f"{len(self.classes)} classes are numbered 0 to {len(self.classes) - 1}: "
                    "correct the labels"
                )

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for regression."""
        return len(self.classes)

    @property
    def num_targets(self) -> int:
        """Number of regression targets per example; 0 for classification."""
        return 0 if self.classes else math.prod(self.train.targets.shape[1:])

    @property
    def train_size(self) -> int:
        """Number of training examples, excluding those held out for validation."""
        return len(self.train)

    @cached_property
    def digest(self) -> str:
        """Digest of all examples of the whole data set, and of the names of the classes.

        A part of it has the same one, as which part it is follows from the settings. For a table it is of its
        file, and of the test rows where another file names them.
        """
        if self.encoding is not None:
            named = self.table is not None and self.table.named_rows
            return digest(self.encoding.sha256, *(self.table.test if self.table and named else ()))
        if self.part_of is not None:
            return self.part_of
        parts = (self.train, self.validation, self.test)
        return digest(self.classes, [None if part is None else part.digest() for part in parts])

    def divided(self, train: Tensor, validation: Tensor | None = None) -> DataSet:
        """Return the data set with only some of its training examples.

        A table is encoded anew, because its encoding is fitted to the training rows alone.

        Args:
            train: Positions in the training split of the examples to keep.
            validation: Positions of those for validation, or None to leave validation as it is.
        """
        if self.table is not None:
            return self.table.divided(train, validation).dataset()
        held = self.validation if validation is None else self.train.subset(validation)
        part = self.train.subset(train)
        return replace(self, train=part, validation=held, part_of=self.digest)


def hold_out(data: DataSet, validation: float | int, seed: int) -> DataSet:
    """Move examples from the training split into a validation split.

    Args:
        data: Data set whose training split is divided.
        validation: Number of examples (int) or fraction of them (float below 1); 0 returns the data
            set unchanged.
        seed: Seed of the random permutation of the training split whose last examples are taken.
    """
    size = len(data.train)
    count = round(validation * size) if isinstance(validation, float) else int(validation)
    fraction_off = isinstance(validation, float) and not 0 <= validation < 1
    if isinstance(validation, bool) or fraction_off or not 0 <= count < size:
        raise ValueError(
            f"validation is {validation}: give a fraction of at least 0 and below 1, or a number of "
            f"examples below the {size} of the training split"
        )
    if count == 0:
        return data
    if data.validation is not None:
        raise ValueError(
            f"data set {data.name!r} already has a validation split of {len(data.validation)} "
            "examples: leave validation at 0"
        )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    # Sorted, so that both splits keep the order of their source files.
    kept, held = order[: size - count].sort().values, order[size - count :].sort().values
    return data.divided(kept, held)
