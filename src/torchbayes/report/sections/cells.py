"""The cells of the table: value, spread, and whether it is the best or level with it."""

from __future__ import annotations

from dataclasses import dataclass

from torchbayes.report.columns import Column, best_value, is_best, is_level
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.wording import times

__all__ = ["Cell", "cell_of"]

_COSTS = ("seconds", "seconds_per_epoch", "peak_memory", "stored")


@dataclass(frozen=True)
class Cell:
    """One value of the table.

    Attributes:
        value: The value in full, or None if it is undefined.
        text: The value as shown.
        spread: Its standard deviation over seeds as shown, or empty.
        best: Whether no method is better.
        level: Whether seeds alone could explain the distance from the best.
        aside: A second line, such as the cost relative to the baseline.
    """

    value: float | None
    text: str
    spread: str = ""
    best: bool = False
    level: bool = False
    aside: str = ""


def cell_of(column: Column, method: MethodResult, results: Results) -> Cell:
    """A method's cell in a column."""
    value, spread = method.scores.get(column.key), method.spread.get(column.key)
    if value is None:
        return Cell(None, "–")
    best = best_value(column, [row.scores for row in results.methods])
    first = is_best(column, value, best)
    cost = column.key in _COSTS
    return Cell(
        value,
        column.show(value),
        "" if spread is None or cost else column.show(spread).rstrip("\u202f%"),
        first,
        not first and is_level(column, method, results.methods),
        _relative(column.key, value, results) if cost else "",
    )


def _relative(key: str, value: float, results: Results) -> str:
    baseline = results.find("map")
    base = None if baseline is None else baseline.scores.get(key)
    return "" if base is None or base <= 0 else f"{times(value / base)} map"
