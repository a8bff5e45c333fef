"""Texts in a table that are no levels: numbers with commas, dates, identifiers and free text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchbayes.data.source import DataError
from torchbayes.data.table_file import TextTable, number, shown

__all__ = ["check_levels"]

_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}.*|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})(\D.*)?")
_WITH_COMMA = re.compile(r"[-+]?\d+(,\d+)+(\.\d+)?|[-+]?\d+(\.\d+)*,\d+")


def check_levels(
    table: TextTable, name: str, known: Sequence[str], advice: str, most: int | None = None
) -> None:
    """Raise a `DataError` if a column's texts are numbers with commas, dates, or different in most rows.

    Args:
        table: The table.
        name: Name of the column.
        known: Its fields that are not missing.
        advice: What to do, for the message.
        most: The largest number of levels; None for no limit but half of the rows.
    """
    levels = set(known)
    odd = sorted(field for field in levels if number(field) is None)
    some_numbers = len(odd) < len(levels) or len(odd) > 2  # two texts such as 1,2 and 3,4 are names
    if odd and some_numbers and all(_WITH_COMMA.fullmatch(field) for field in odd):
        raise DataError(
            f"{table.path} has numbers with a comma in column {shown(name)}, such as {shown(odd[0])}: write "
            f"them with a decimal point and without separators, or {advice}"
        )
    if all(_DATE.fullmatch(field) for field in levels):
        raise DataError(
            f"{table.path} has dates in column {shown(name)}, such as {shown(known[0])}: turn them into "
            f"numbers (a year, a month, days since …), or {advice}"
        )
    if len(levels) > (most or len(known)) or (len(levels) > 2 and 2 * len(levels) > len(known)):
        mixed = f" ({shown(odd[0])} is not a number)" if 0 < len(odd) < len(levels) else ""
        raise DataError(
            f"{table.path} has {len(levels)} different values in the {len(known)} rows of column "
            f"{shown(name)}, too many for levels{mixed}: an identifier or free text says nothing about new "
            f"rows, so {advice}"
        )
