"""What happens to an example before the network sees it, as far as it can be written down.

A run folder keeps it in inputs.json, and how a table is encoded in table.json.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.arrays import as_inputs, as_tensors
from torchbayes.core.batch import split_batch
from torchbayes.core.errors import FileError
from torchbayes.core.reading import read_json
from torchbayes.core.storage import write_json
from torchbayes.data.images import read_image
from torchbayes.data.order import EpochLoader
from torchbayes.data.table_encoding import TableEncoding
from torchbayes.data.table_file import frame_table, read_text_table
from torchbayes.data.transform import Chain, Normalise, PadCropFlip

__all__ = ["Preprocessing"]

_FORMAT, _VERSION = "torchbayes-inputs", 1
_ENTRIES = ("normalise", "unknown", "shape", "classes")


@dataclass(frozen=True)
class Preprocessing:
    """How examples become inputs of a network, and what the network's classes are called.

    Call it with inputs to prepare them; augmentation is no part of it.

    Attributes:
        normalise: Normalisation of the inputs, or None.
        unknown: Name of a transform that cannot be written down, such as a function of the user's: whoever
            predicts has to apply it. Empty if there is none.
        shape: Shape of one input, if it is known.
        classes: Names of the classes in the order of their numbers, if they are known.
        table: How the columns of a table are encoded, or None.

    Example:
        >>> import torch
        >>> from torchbayes.data import Normalise
        >>> Preprocessing.of(Normalise((0.5,), (0.25,)))(torch.ones(2, 1))
        tensor([[2.],
                [2.]])
    """

    normalise: Normalise | None = None
    unknown: str = ""
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    table: TableEncoding | None = None

    @classmethod
    def of(cls, transform: Callable[..., Any] | None) -> Preprocessing:
        """Return what of a transform of the training data happens to new data as well."""
        parts = transform.transforms if isinstance(transform, Chain) else (transform,)
        kept = [part for part in parts if part is not None and not isinstance(part, PadCropFlip)]
        if not kept:
            return cls()
        if len(kept) == 1 and isinstance(kept[0], Normalise):
            return cls(kept[0])
        return cls(unknown=getattr(transform, "__name__", type(transform).__name__))

    def __call__(self, inputs: Any) -> Any:
        """Return inputs as the network takes them: a tensor, or a loader of such batches.

        Args:
            inputs: Tensors, arrays or a loader of them. If the run is on a table, also its file or a data
                frame with its columns; tensors and arrays are then rows that are encoded already. If it is
                on images, also an image file or a list of them.
        """
        if self.table is not None:
            return self._encoded(self.table, inputs)
        files = [inputs] if isinstance(inputs, (str, Path)) else inputs
        if isinstance(files, (list, tuple)) and files and isinstance(files[0], (str, Path)):
            if len(self.shape) != 3:
                raise TypeError(
                    f"the inputs are files, {files[0]} among them, but the run is not known to be one on "
                    "images: read them and pass a tensor"
                )
            inputs = torch.stack([read_image(file, self.shape) for file in files])
        if self.normalise is None or (
            isinstance(inputs, EpochLoader) and inputs.transform is not None
        ):
            return inputs
        inputs = as_inputs(inputs)
        if isinstance(inputs, Tensor):
            return self.normalise(inputs)
        if isinstance(inputs, Iterable) and not isinstance(inputs, (tuple, Mapping)):
            return _Prepared(inputs, self.normalise)
        raise TypeError(
            f"the run normalises its inputs, which takes a tensor or a loader of them, not a "
            f"{type(inputs).__name__}: pass one"
        )

    @staticmethod
    def _encoded(encoding: TableEncoding, inputs: Any) -> Any:
        if isinstance(inputs, (str, Path)):
            text = read_text_table(inputs, header=encoding.header, least=1)
        elif hasattr(inputs, "columns") and hasattr(inputs, "to_numpy"):
            text = frame_table(inputs)
        else:
            return inputs
        found, notes = encoding.encode(text)
        for note in notes:
            warnings.warn(note, stacklevel=4)
        return found

    def save(self, inputs: Path, table: Path) -> None:
        """Write the file of a run folder, and a second one for a table.

        Args:
            inputs: File for all but the encoding of a table.
            table: File for that.
        """
        own = None if self.normalise is None else asdict(self.normalise)
        content = {
            "format": _FORMAT, "version": _VERSION, "normalise": own, "unknown": self.unknown,
            "shape": self.shape, "classes": self.classes,
        }  # fmt: skip
        write_json(inputs, content)
        if self.table is not None:
            self.table.save(table)

    @classmethod
    def load(cls, inputs: Path, table: Path, remedy: str) -> Preprocessing:
        """Read the files of a run folder; without them, nothing is known.

        Args:
            inputs: File for all but the encoding of a table.
            table: File for that.
            remedy: What to do if they cannot be read, for messages.
        """
        encoding = TableEncoding.load(table) if table.exists() else None
        if not inputs.exists():
            classes = () if encoding is None else encoding.classes
            return cls(classes=classes, table=encoding)
        content = read_json(inputs, remedy)
        try:
            if content["format"] != _FORMAT or content["version"] > _VERSION:
                raise ValueError(f"version {content['version']} of {content['format']}")
            if content.keys() != {"format", "version", *_ENTRIES}:  # such as a damaged checksum
                raise ValueError(f"entries {sorted(content)}")
            own = content["normalise"]
            return cls(
                None if own is None else Normalise(_numbers(own["mean"]), _numbers(own["std"])),
                str(content["unknown"]),
                tuple(int(size) for size in content["shape"]),
                tuple(str(name) for name in content["classes"]),
                encoding,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(
                f"{inputs} is damaged or was written by a newer torchbayes ({error!r}): {remedy}"
            ) from error


def _numbers(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@dataclass(frozen=True)
class _Prepared:
    """A loader whose batches are normalised, without their targets."""

    loader: Iterable[Any]
    normalise: Normalise

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self.normalise(as_tensors(split_batch(batch)[0]))
