"""How the columns of a table become the inputs of a network, and how the target is scaled.

All statistics are those of the training rows:

- a column of numbers: missing values become the median, then z = (x − mean) / std, of the imputed values;
- any other column: missing values become the most frequent level, then one input per level, 1 or 0. A level
  that the training rows do not have is 0 in all of them;
- beside each column with missing values an input that is 1 where the value is missing;
- a target of numbers: standardised, too; predictions are given back in its own units.

These are scikit-learn's `SimpleImputer(add_indicator=True)`, `StandardScaler` and
`OneHotEncoder(handle_unknown="ignore")`, and a run folder keeps them in table.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbayes.core.errors import FileError
from torchbayes.core.reading import read_json
from torchbayes.core.storage import write_json
from torchbayes.data.levels import check_levels
from torchbayes.data.source import DataError
from torchbayes.data.table_file import Floats, TextTable, is_missing, number, shown

__all__ = ["CategoryColumn", "NumberColumn", "TableEncoding", "fit_columns", "label"]

_FORMAT, _VERSION = "torchbayes-table", 1
_MOST_LEVELS = 100
_REMEDY = "start the run again with resume=True, which writes it anew"


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers.

    Attributes:
        name: Name of the column.
        median: Takes the place of missing values.
        mean: Mean of the training rows.
        std: Standard deviation of the training rows; 0 if they are all the same.
        indicator: Whether an input says that the value is missing.
    """

    name: str
    median: float
    mean: float
    std: float
    indicator: bool

    @property
    def inputs(self) -> list[str]:
        """Name of every input that the column becomes."""
        return [self.name] * (self.std > 0) + [f"{self.name} is missing"] * self.indicator

    def encode(self, table: TextTable, index: int) -> tuple[list[Floats], set[str]]:
        """Return the inputs of a table's column, and nothing that would be unknown."""
        values = table.numbers(index)
        missing = np.isnan(values)
        found = []
        if self.std > 0:
            found.append((np.where(missing, self.median, values) - self.mean) / self.std)
        return found + [missing.astype(np.float64)] * self.indicator, set()


@dataclass(frozen=True)
class CategoryColumn:
    """A column of levels.

    Attributes:
        name: Name of the column.
        levels: Levels of the training rows, in order.
        mode: The most frequent level, which takes the place of missing values.
        indicator: Whether an input says that the value is missing.
    """

    name: str
    levels: tuple[str, ...]
    mode: str
    indicator: bool

    @property
    def inputs(self) -> list[str]:
        """Name of every input that the column becomes."""
        own = [f"{self.name} = {level}" for level in self.levels] if len(self.levels) > 1 else []
        return own + [f"{self.name} is missing"] * self.indicator

    def encode(self, table: TextTable, index: int) -> tuple[list[Floats], set[str]]:
        """Return the inputs of a table's column, and the levels that the training rows did not have."""
        fields = table.column(index)
        missing = np.array([is_missing(field) for field in fields], dtype=bool)
        values = [self.mode if gone else f for f, gone in zip(fields, missing, strict=True)]
        place = {level: index for index, level in enumerate(self.levels)}
        codes = np.array([place.get(value, -1) for value in values], dtype=np.int64)
        found = []
        if len(self.levels) > 1:
            found = [(codes == index).astype(np.float64) for index in range(len(self.levels))]
        return found + [missing.astype(np.float64)] * self.indicator, set(values) - place.keys()


@dataclass(frozen=True)
class TableEncoding:
    """How a table becomes inputs and targets.

    Attributes:
        names: Names of all columns of the table, in order.
        header: Whether they are the table's own; otherwise columns are found by their position.
        columns: The columns that are inputs.
        left_out: Reason for each column that is neither an input nor the target.
        target: Name of the target's column.
        classes: Class names in the order of their numbers; empty for a regression.
        mean: Mean of a regression's target.
        std: Standard deviation of a regression's target.
        sha256: Checksum of the table's file.
    """

    names: tuple[str, ...]
    header: bool
    columns: tuple[NumberColumn | CategoryColumn, ...]
    left_out: dict[str, str]
    target: str
    classes: tuple[str, ...]
    mean: float
    std: float
    sha256: str

    @property
    def inputs(self) -> list[str]:
        """Name of every input of the network."""
        return [name for column in self.columns for name in column.inputs]

    def encode(self, table: TextTable) -> tuple[Tensor, list[str]]:
        """Return the inputs (rows, inputs) of a table, and sentences about what was unusual.

        Columns are found by name, in any order, or by position if the tables have no header. The target may
        be among them or not.

        Raises:
            DataError: If a column is missing or has something else than numbers where they are expected.
        """
        places, notes = self._places(table)
        found: list[Floats] = []
        for column in self.columns:
            parts, unknown = column.encode(table, places[column.name])
            found += parts
            if unknown:
                some = ", ".join(shown(level) for level in sorted(unknown)[:3])
                more = ", …" if len(unknown) > 3 else ""
                notes.append(
                    f"column {shown(column.name)} has levels that the training rows do not have ({some}"
                    f"{more}): they count as none of the known ones"
                )
        inputs = torch.from_numpy(np.stack(found, 1) if table.rows else np.empty((0, len(found))))
        result = inputs.float()
        if not bool(result.isfinite().all()):
            bad = self.inputs[int((~result.isfinite()).any(0).nonzero()[0])]
            raise DataError(
                f"{table.path} has a value in column {shown(bad)} that is too far from the training rows to "
                "compute with: correct it"
            )
        return result, notes

    def _places(self, table: TextTable) -> tuple[dict[str, int], list[str]]:
        """Return the index in a table of each column of this encoding."""
        inputs = [column.name for column in self.columns]
        if not self.header:
            without = [name for name in self.names if name != self.target]
            for names in (self.names, without):
                if not table.header and len(table.names) == len(names):
                    return {name: index for index, name in enumerate(names)}, []
            raise DataError(
                f"{table.path} has {len(table.names)} columns{' with names' if table.header else ''}, "
                f"expected the {len(self.names)} of the training table, or {len(without)} without its "
                f"target (column {self.target}), in the same order and without a header"
            )
        missing = [name for name in inputs if name not in table.names]
        if missing:
            extra = [name for name in table.names if name not in self.names]
            has = (
                f"; it has {shown(extra[0])}, which the training table does not have"
                if extra
                else ""
            )
            raise DataError(
                f"{table.path} lacks the column{'s' * (len(missing) > 1)} "
                f"{', '.join(map(shown, missing))} of the training table{has}: give every input a column, "
                "with its name in the first row"
            )
        table.check_names(inputs)
        unused = [name for name in table.names if name not in self.names]
        notes = [f"columns that were not used: {', '.join(map(shown, unused))}"] if unused else []
        return {name: table.names.index(name) for name in inputs}, notes

    def encode_target(self, table: TextTable, index: int, rows: Sequence[int]) -> Tensor:
        """Return the targets of some rows: class numbers (rows,) or standardised values (rows, 1)."""
        if self.classes:
            place = {name: number for number, name in enumerate(self.classes)}
            labels = [label(table.rows[row][index]) for row in rows]
            return torch.tensor([place[name] for name in labels], dtype=torch.int64)
        values = torch.from_numpy(table.numbers(index)[list(rows)])
        return ((values - self.mean) / self.std).float().unsqueeze(1)

    def save(self, path: str | Path) -> None:
        """Write the encoding as JSON."""
        columns = [{"kind": type(column).__name__, **asdict(column)} for column in self.columns]
        content = {"format": _FORMAT, "version": _VERSION, **asdict(replace(self, columns=()))}
        write_json(path, content | {"columns": columns})

    @classmethod
    def load(cls, path: str | Path) -> TableEncoding:
        """Read a file of `save`.

        Raises:
            DataError: If it is missing, damaged or of a newer version.
        """
        path = Path(path)
        if not path.exists():
            raise DataError(f"there is no {path}, which says how the table was encoded: {_REMEDY}")
        try:
            content: dict[str, Any] = read_json(path, _REMEDY)
            if content.pop("format") != _FORMAT:
                raise ValueError("it is of another kind")
            version = content.pop("version")
            if version == _VERSION:
                if len(content["sha256"]) != 64:  # a piece is gone, with the file's own checksum
                    raise ValueError("it is cut short")
                kinds = {kind.__name__: kind for kind in (NumberColumn, CategoryColumn)}
                columns = []
                for column in content.pop("columns"):
                    kind = kinds[column.pop("kind")]
                    columns.append(kind(**{k: _tuple(v) for k, v in column.items()}))
                rest = {key: _tuple(value) for key, value in content.items()}
                return cls(columns=tuple(columns), **rest)
        except FileError as error:
            raise DataError(str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged or not an encoding of a table: {_REMEDY}"
            ) from error
        raise DataError(f"{path} is of version {version}, newer than this torchbayes: upgrade it")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def label(field: str) -> str:
    """Return the name of a class: 1, 1.0 and 01 are the same one."""
    value = number(field)
    return field if value is None or not math.isfinite(value) else f"{value:.15g}"


def fit_columns(
    table: TextTable, indices: Sequence[int], rows: Sequence[int]
) -> tuple[tuple[NumberColumn | CategoryColumn, ...], dict[str, str]]:
    """Fit the encoding of some columns to the training rows.

    Whether a column holds numbers is decided by all rows, everything else by the training rows.

    Returns:
        The columns that are inputs, and the reason for each of the others.
    """
    columns: list[NumberColumn | CategoryColumn] = []
    left_out: dict[str, str] = {}
    for index in indices:
        name, fields = table.names[index], table.column(index)
        known = [field for field in fields if not is_missing(field)]
        if not name:
            left_out[name] = _nameless(table, index, known)
            continue
        column = (
            _number_column(table, name, table.numbers(index)[list(rows)])
            if table.is_numeric(index)
            else _category_column(table, name, known, [fields[row] for row in rows])
        )
        if column is not None and column.inputs:
            columns.append(column)
        else:
            left_out[name] = "the same in all training rows" if column else "empty"
    if not columns:
        raise DataError(
            f"{table.path} has no column to predict from: all but the target are the same in every row, "
            "empty or left out"
        )
    return tuple(columns), left_out


def _nameless(table: TextTable, index: int, known: Sequence[str]) -> str:
    """Return why a column without a name is left out: pandas writes a table's row numbers like that."""
    if not known:
        return "empty"
    start = number(known[0])
    if start in (0, 1) and [number(f) for f in known] == [start + i for i in range(len(known))]:
        return "row numbers without a name"
    raise DataError(f"{table.path} has no name for its column {index}: add one to its first row")


def _number_column(table: TextTable, name: str, values: Floats) -> NumberColumn | None:
    missing = np.isnan(values)
    if missing.all():
        return None
    median = float(np.median(values[~missing]))
    filled = np.where(missing, median, values)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(filled.mean()), float(filled.std())
    if not math.isfinite(std):
        raise DataError(
            f"{table.path} has numbers in column {shown(name)} that are too large to standardise: rescale it "
            f"or leave it out with drop=[{shown(name)}]"
        )
    same = bool((filled == filled[0]).all())
    return NumberColumn(name, median, mean, 0.0 if same else std, bool(missing.any()))


def _category_column(
    table: TextTable, name: str, known: Sequence[str], chosen: Sequence[str]
) -> CategoryColumn | None:
    check_levels(table, name, known, f"leave it out with drop=[{shown(name)}]", _MOST_LEVELS)
    seen = [field for field in chosen if not is_missing(field)]
    if not seen:
        return None
    names, counts = np.unique(np.array(seen, dtype=object), return_counts=True)
    mode = str(names[int(counts.argmax())])
    return CategoryColumn(name, tuple(map(str, names)), mode, len(seen) < len(chosen))
