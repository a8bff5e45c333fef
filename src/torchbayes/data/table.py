"""Data sets from tables: the target and its task, and which rows are for training and for testing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchbayes.data.dataset import DataSet, Split
from torchbayes.data.levels import check_levels
from torchbayes.data.source import DataError
from torchbayes.data.table_encoding import (
    NumberColumn,
    TableEncoding,
    fit_columns,
    label,
)
from torchbayes.data.table_file import (
    TextTable,
    is_missing,
    number,
    read_text_table,
    refuse_device,
    shown,
)

__all__ = [
    "TASKS",
    "TEST_SHARE",
    "Table",
    "encoded_nothing",
    "load_table",
    "read_rows",
    "without_rows",
]

TASKS = ("classification", "regression")
TEST_SHARE = 0.2

_FEW = 10  # different whole numbers in a target that are still taken for classes

Rows = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Table:
    """A table and what its rows and columns are for.

    Attributes:
        name: Name of the data set.
        text: The fields.
        target: Index of the target's column.
        inputs: Indices of the columns to predict from.
        dropped: Names of the columns that the user left out.
        task: Either of `TASKS`.
        said: Sentences about what was decided.
        splits: Gives the training and the test rows of a split's number.
        train: Rows to train on; the encoding is fitted to them.
        test: Rows to test on.
        validation: Rows held out from training, or None.
        given: Encoding of an earlier run to use instead of fitting one, or None.
        chosen: How the test rows were chosen.
        named_rows: Whether a file names the test rows, so that they do not follow from the settings.
    """

    name: str
    text: TextTable
    target: int
    inputs: tuple[int, ...]
    dropped: tuple[str, ...]
    task: str
    said: tuple[str, ...]
    splits: Callable[[int], tuple[Rows, Rows]]
    train: Rows = ()
    test: Rows = ()
    validation: Rows | None = None
    given: TableEncoding | None = None
    chosen: str = ""
    named_rows: bool = False

    def split(self, number: int) -> Table:
        """Return the table with the rows of another split."""
        train, test = self.splits(number)
        return replace(self, train=train, test=test, validation=None, chosen=f"split {number}")

    def divided(self, train: Tensor, validation: Tensor | None) -> Table:
        """Return the table with only some of its training rows, and others for validation.

        Args:
            train: Positions in the training rows.
            validation: Positions in the training rows, or None to leave validation as it is.
        """
        held = self.validation
        if validation is not None:
            held = tuple(self.train[i] for i in validation.tolist())
        return replace(self, train=tuple(self.train[i] for i in train.tolist()), validation=held)

    @property
    def encoding(self) -> TableEncoding:
        """The given encoding, or one that is fitted to the training rows."""
        if self.given is not None:
            if self.given.sha256 != self.text.sha256:
                raise DataError(
                    f"{self.text.path} is not the table that the run was trained on, so its test rows are no "
                    "longer known: restore it, or train again"
                )
            return self.given
        text, name = self.text, self.text.names[self.target]
        columns, left_out = fit_columns(text, self.inputs, self.train)
        classes: tuple[str, ...] = ()
        mean, std = 0.0, 1.0
        fields = text.column(self.target)
        if self.task == "classification":
            classes = _classes(field for field in fields if not is_missing(field))
            if len(classes) < 2:
                raise DataError(
                    f"{text.path} has one class, {shown(classes[0])}, in column {shown(name)}: a classifier "
                    "needs two, so choose another target"
                )
        else:
            values = text.numbers(self.target)[list(self.train)]
            mean, std = float(values.mean()), float(values.std())
            if not (std > 0 and math.isfinite(std)):
                raise DataError(
                    f"{text.path} has the same number, {values[0]:g}, in column {shown(name)} of all "
                    "training rows: choose another target"
                )
        return TableEncoding(
            text.names, text.header, columns, dict.fromkeys(self.dropped, "dropped") | left_out, name,
            classes, mean, std, text.sha256,
        )  # fmt: skip

    def dataset(self) -> DataSet:
        """Encode the table."""
        if len(self.train) < 2 or not self.test:
            raise DataError(
                f"{self.text.path} leaves {_count(len(self.train), 'row')} to train on and {len(self.test)} "
                "to test on: give more rows, or another share of them for testing"
            )
        encoding = self.encoding
        inputs, notes = encoding.encode(self.text)

        def split(rows: Rows) -> Split:
            targets = encoding.encode_target(self.text, self.target, rows)
            return Split(inputs[list(rows)], targets)

        train = split(self.train)
        if encoding.classes:
            absent = set(range(len(encoding.classes))) - set(train.targets.tolist())
            names = ", ".join(shown(encoding.classes[number]) for number in sorted(absent))
            notes += [f"no training rows of {names}"] if absent else []
        return dataclasses.replace(
            encoded_nothing(self.name, encoding),
            train=train,
            test=split(self.test),
            validation=None if self.validation is None else split(self.validation),
            note=" ".join(
                f"{part[0].upper()}{part[1:]}."
                for part in (*self.said, *_about(encoding, self), *notes)
            ),
            table=self,
        )


def encoded_nothing(name: str, encoding: TableEncoding) -> DataSet:
    """Return a data set without examples that has the shape and the classes of a table."""
    width = len(encoding.inputs)
    none = Split(torch.empty(0, width), torch.empty((0,) if encoding.classes else (0, 1)))
    return DataSet(
        name=name, train=none, test=none, validation=None, classes=encoding.classes, shape=(width,),
        mean=(0.0,) * width, std=(1.0,) * width, encoding=encoding,
    )  # fmt: skip


def load_table(
    path: str | Path,
    *,
    target: str | int | None = None,
    task: str | None = None,
    drop: Sequence[str | int] = (),
    split: str | int | Path = 0,
    test_share: float = TEST_SHARE,
    encoding: TableEncoding | None = None,
) -> DataSet:
    """Build a data set from a table in a text file.

    Args:
        path: File with a row per example; see `torchbayes.data.table_file`.
        target: Column to predict: its name, or its number from 0 or, negative, from the end. By default the
            last one.
        task: classification or regression; by default found from the target.
        drop: Columns to leave out.
        split: Seed of the random choice of test rows, or a file with their numbers (from 0).
        test_share: Share of the rows to test on, if they are chosen at random.
        encoding: Encoding of an earlier run on this table, to use instead of fitting one.
    """
    text = read_text_table(path)
    text.check_names(text.names)
    if not text.rows:
        raise DataError(f"{text.path} has column names but no rows: give a row per example")
    index = text.find(-1 if target is None else target, "the target")
    said = [f"target: {shown(text.names[index])}" + " (the last column)" * (target is None)]
    dropped = [text.find(column, "to be left out") for column in drop]
    if index in dropped:
        raise DataError(f"column {shown(text.names[index])} is the target and cannot be left out")
    usable = tuple(row for row, fields in enumerate(text.rows) if not is_missing(fields[index]))
    if not usable:
        raise DataError(
            f"{text.path} has no values in its target, column {shown(text.names[index])}"
        )
    known = [text.rows[row][index] for row in usable]
    task = _task(text, index, known, task, said)
    if task == "classification":
        check_levels(text, text.names[index], known, "choose another target")
    gone = len(text.rows) - len(usable)
    if gone:
        said.append(f"{_count(gone, 'row')} without a target left out")
    strata = [label(field) for field in known] if task == "classification" else None

    def splits(number: int) -> tuple[Rows, Rows]:
        test = {usable[i] for i in _random_rows(len(usable), test_share, number, strata)}
        return without_rows(usable, test), without_rows(usable, set(usable) - test)

    table = Table(
        name=text.path.name,
        text=text,
        target=index,
        inputs=tuple(i for i in range(len(text.names)) if i != index and i not in dropped),
        dropped=tuple(text.names[i] for i in dropped),
        task=task,
        said=tuple(said),
        splits=splits,
        given=encoding,
    )
    if not 0 < test_share < 1:
        raise DataError(
            f"test_share is {test_share:g}: expected a share of the rows between 0 and 1"
        )
    if str(split).isdecimal():
        return table.split(int(str(split))).dataset()
    test = set(read_rows(Path(str(split)).expanduser(), len(text.rows)))
    rows = without_rows(usable, test), without_rows(usable, set(usable) - test)
    return replace(
        table, train=rows[0], test=rows[1], chosen=f"those of {split}", named_rows=True
    ).dataset()


def without_rows(rows: Sequence[int], gone: set[int]) -> Rows:
    """Return the rows that are not among `gone`, in order."""
    return tuple(row for row in rows if row not in gone)


def read_rows(path: Path, count: int) -> list[int]:
    """Read a file of row numbers, from 0, separated by white space.

    Args:
        path: File.
        count: Number of rows in the table.
    """
    refuse_device(path)
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        raise DataError(
            f"there is no file of row numbers {path}: give a whole number, or a file with the numbers of the "
            "test rows"
        ) from None
    # Gal's files are written by NumPy: 307 or 3.070000000000000000e+02.
    values = [number(word) for word in words]
    for word, value in zip(words, values, strict=True):
        if value is None or not 0 <= value < count or value != int(value):
            raise DataError(
                f"{path} has {shown(word)}, expected row numbers from 0 to {count - 1} of the table"
            )
    rows = [int(value) for value in values if value is not None]
    if not rows or len(set(rows)) < len(rows):
        raise DataError(f"{path} has {'no row' if not rows else 'a row twice'}: list each row once")
    return rows


def _random_rows(count: int, share: float, seed: int, strata: list[str] | None) -> list[int]:
    """Draw test rows, from every stratum in proportion to its size."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    if strata is not None:
        order.sort(key=lambda row: strata[row])  # stable: the order in a stratum stays random
    # Every 1/share-th row of this order, beginning in the middle of the first step.
    steps = [math.floor(i * share + 0.5) for i in range(count + 1)]
    return [row for i, row in enumerate(order) if steps[i + 1] > steps[i]]


def _task(text: TextTable, index: int, known: list[str], task: str | None, said: list[str]) -> str:
    """Return the task, and say how it was found."""
    if task is not None and task not in TASKS:
        raise DataError(f"task is {task!r}: expected {' or '.join(TASKS)}")
    values = [number(field) for field in known]
    numeric, different = None not in values, len(set(values))
    if task == "regression" and not numeric:
        bad = next(f for f, value in zip(known, values, strict=True) if value is None)
        raise DataError(
            f"{text.path} has {shown(bad)} in column {shown(text.names[index])}, the target of a regression, "
            "which needs numbers: choose another target, or classification"
        )
    if task is not None:
        said.append(f"task: {task}")
        return task
    whole = numeric and all(field.lstrip("+-").isdecimal() for field in known)
    if not numeric:
        why = "classification", "the target is text"
    elif different == 2:
        why = "classification", "the target has two values"
    elif whole and different <= _FEW and 2 * different <= len(known):
        why = "classification", f"the target has {different} different whole numbers"
    else:
        why = "regression", "the target is a number"
    said.append(f"task: {why[0]} ({why[1]}; --task overrides)")
    return why[0]


def _classes(fields: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the classes, numbers in their own order."""
    names = {label(field) for field in fields}
    values = {name: number(name) for name in names}
    if None in values.values():
        return tuple(sorted(names))
    return tuple(sorted(names, key=lambda name: values[name] or 0.0))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _about(encoding: TableEncoding, table: Table) -> list[str]:
    """Say what became of the columns and rows."""
    said = []
    for reason in sorted(set(encoding.left_out.values()) - {"dropped"}):
        names = [name for name, why in encoding.left_out.items() if why == reason]
        said.append(f"left out: {', '.join(map(shown, names))} ({reason})")
    missing = [column.name for column in encoding.columns if column.indicator]
    if missing:
        said.append(
            f"missing values in {', '.join(map(shown, missing))}: replaced by the median or the most "
            "frequent level, and marked"
        )
    held = "" if table.validation is None else f", {len(table.validation):,} for validation"
    numeric = sum(isinstance(column, NumberColumn) for column in encoding.columns)
    rest = len(encoding.columns) - numeric
    said.append(
        f"{_count(len(encoding.inputs), 'input')} from {_count(numeric, 'column')} of numbers and {rest} of "
        f"levels, standardised; {_count(len(table.train), 'row')} to train on{held} and "
        f"{len(table.test):,} to test on ({table.chosen})"
    )
    return said
