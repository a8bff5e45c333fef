"""Tables in text files: fields, column names, and what can be wrong with such a file.

Comma, semicolon, tab and white space are told apart by the first lines. The first row names the columns if
none of its fields is a number, or if one of its fields is text above a column of numbers; otherwise columns
are named by their number, from 0.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchbayes.data.source import DataError

__all__ = [
    "Floats",
    "TextTable",
    "frame_table",
    "is_missing",
    "number",
    "read_text_table",
    "refuse_device",
    "shown",
]

Floats = npt.NDArray[np.float64]

_MISSING = frozenset(("", "na", "n/a", "#n/a", "nan", "null", "none", "?", "<na>"))
_DELIMITERS = (",", ";", "\t")
_LOOKED_AT = 50  # lines that the delimiter is found by
_LARGEST_FIELD = (
    100_000  # characters; what is longer is a document or a quote that was never closed
)


def is_missing(field: str) -> bool:
    """Whether a field stands for a missing value: empty, NA, NaN, null, None or a question mark."""
    return len(field) < 5 and field.casefold() in _MISSING


def number(field: str) -> float | None:
    """Return the number that a field holds, or None if it is not one.

    Example:
        >>> number("-1.5e3"), number("1_000"), number("red")
        (-1500.0, None, None)
    """
    if "_" in field:  # Python's own 1_000
        return None
    try:
        value = float(field)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def shown(field: object, limit: int = 40) -> str:
    """Quote a name or value for a message: control characters escaped, and cut if it is long."""
    text = str(field)
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


@dataclass(frozen=True, eq=False)
class TextTable:
    """The fields of a table.

    Attributes:
        path: File.
        names: Name of each column.
        rows: Fields of each row, white space around them removed.
        header: Whether the names are the file's own.
        sha256: Checksum of the file.
    """

    path: Path
    names: tuple[str, ...]
    rows: list[list[str]]
    header: bool
    sha256: str
    _numbers: dict[int, Floats | None] = field(default_factory=dict, repr=False)

    def is_numeric(self, index: int) -> bool:
        """Whether every value of a column is a number, as far as it is not missing."""
        if index not in self._numbers:
            values = [math.nan if is_missing(f) else number(f) for f in self.column(index)]
            # Kept, because a table is encoded anew for every split.
            self._numbers[index] = None if None in values else np.array(values, np.float64)
        return self._numbers[index] is not None

    def numbers(self, index: int) -> Floats:
        """Return a column of numbers, NaN where they are missing.

        Raises:
            DataError: If something in the column is not a finite number.
        """
        values = self._numbers[index] if self.is_numeric(index) else None
        if values is not None and not bool(np.isinf(values).any()):
            return values
        row, text = next(
            (row, text)
            for row, text in enumerate(self.column(index))
            if not is_missing(text) and number(text) in (None, math.inf, -math.inf)
        )
        raise DataError(
            f"{self.path} has {shown(text)} in column {shown(self.names[index])}, row {row + 1}, where "
            "numbers are expected: correct it, or leave the field empty if the value is missing"
        )

    def column(self, index: int) -> list[str]:
        """Return the fields of a column."""
        return [row[index] for row in self.rows]

    def check_names(self, wanted: Sequence[str]) -> None:
        """Raise a `DataError` if two columns have the same of the wanted names."""
        for name in wanted:
            if self.names.count(name) > 1:
                what = f"two columns named {shown(name)}" if name else "two columns without a name"
                raise DataError(f"{self.path} has {what}: give every column a name of its own")

    def find(self, wanted: str | int, what: str) -> int:
        """Return the index of a column by its name, or by its number from 0 or, negative, from the end.

        Args:
            wanted: Name or number.
            what: What it is for, for the message.
        """
        name = str(wanted)
        if name in self.names:
            return self.names.index(name)
        if re.fullmatch(r"-?\d+", name) and -len(self.names) <= int(name) < len(self.names):
            return int(name) % len(self.names)
        known = ", ".join(shown(n) for n in self.names[:12])
        more = f" and {len(self.names) - 12} more" if len(self.names) > 12 else ""
        raise DataError(f"{self.path} has no column {shown(name)} ({what}): it has {known}{more}")


def read_text_table(path: str | Path, *, header: bool | None = None, least: int = 2) -> TextTable:
    """Read a table from a text file.

    Args:
        path: The file.
        header: Whether its first row names the columns; None finds out.
        least: The smallest number of columns that is accepted.

    Raises:
        DataError: If the file is missing, empty, not text in UTF-8, or not a table.
    """
    path = Path(path).expanduser()
    refuse_device(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no table {path}: check the path") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give a CSV file") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path} is not text in UTF-8 (byte 0x{data[error.start]:02x} in line {line}): save it as CSV "
            "in UTF-8"
        ) from None
    if "\0" in text:
        raise DataError(f"{path} is not a text file (it contains a zero byte): save it as CSV")
    lines = re.split(r"(?<=\n)", text.replace("\r\n", "\n").replace("\r", "\n"))
    if not any(line.strip() for line in lines):
        raise DataError(f"{path} is empty: give a table with a row per example")
    rows = list(_rows(path, lines, _delimiter(lines, least)))
    width = len(rows[0][1])
    if width < least:
        raise DataError(
            f"{path} has a single column: a table needs a target and at least one input, separated by "
            "commas, semicolons, tabs or spaces"
        )
    for line, row in rows:
        if len(row) != width:
            raise DataError(
                f"{path} has {len(row)} fields in line {line} and {width} in its first row: give every row "
                "as many fields (a field with a delimiter in it stands in double quotes)"
            )
    fields = [row for _, row in rows]
    header = _has_header(fields) if header is None else header
    names = tuple(fields.pop(0)) if header else tuple(map(str, range(width)))
    return TextTable(path, names, fields, header, hashlib.sha256(data).hexdigest())


def refuse_device(path: Path) -> None:
    """Raise a `DataError` for a device such as /dev/zero, which has no end; a pipe has one."""
    if path.is_char_device() or path.is_block_device():
        raise DataError(f"{path} is a device, not a file: give a text file")


def frame_table(frame: Any) -> TextTable:
    """Return a data frame, of pandas or another library, as the table that its CSV file would be.

    Args:
        frame: The data frame, with a name for each column.
    """
    names = tuple(str(name) for name in frame.columns)
    columns = [[_field(value) for value in frame[name].to_numpy()] for name in frame.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return TextTable(Path("the data frame"), names, rows, True, "")


def _field(value: Any) -> str:
    """Return a value of a data frame as text, empty if it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)) or str(value) == "<NA>":
        return ""
    if isinstance(value, (float, np.floating)):
        return repr(float(value)).removesuffix(".0")
    return str(value).strip()


def _delimiter(lines: Sequence[str], least: int) -> str | None:
    """Return the delimiter that gives the first lines most fields, as many in each; None is white space."""
    some = [line for line in lines if line.strip()][:_LOOKED_AT]
    counts = {}
    for delimiter in _DELIMITERS:
        try:
            widths = [len(row) for row in csv.reader(some, delimiter=delimiter) if row]
        except csv.Error:
            widths = [some[0].count(delimiter) + 1, 0]
        counts[delimiter] = (len(set(widths)) == 1, widths[0])
    best = max(_DELIMITERS, key=lambda d: (counts[d][1] > 1, *counts[d]))
    if counts[best] > (True, 1):
        return best
    words = [len(line.split()) for line in some]
    even, alone = len(set(words)) == 1, counts[best][1] == 1
    return None if words[0] > 1 and (even or (alone and least > 1)) else best


def _rows(
    path: Path, lines: Sequence[str], delimiter: str | None
) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of every row that is not empty."""
    if delimiter is None:
        for count, line in enumerate(lines, 1):
            if fields := line.split():
                yield count, fields
        return
    before = csv.field_size_limit(_LARGEST_FIELD)
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        for row in reader:
            fields = [field.strip() for field in row]
            if any(fields):
                yield reader.line_num, fields
    except csv.Error as error:
        raise DataError(
            f"{path} cannot be read as a table near line {reader.line_num} ({error}): look for a double "
            "quote that is not closed"
        ) from None
    finally:
        csv.field_size_limit(before)


def _has_header(rows: Sequence[Sequence[str]]) -> bool:
    first, others = rows[0], rows[1:]
    named = [not is_missing(field) and number(field) is None for field in first]
    if all(named):
        return True

    def numbers(index: int) -> bool:
        values = [row[index] for row in others if not is_missing(row[index])]
        return bool(values) and all(number(value) is not None for value in values)

    return any(text and numbers(index) for index, text in enumerate(named))
