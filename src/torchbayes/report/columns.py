"""The scores on the page: names, meanings, which direction is better, and the cells of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchbayes.report.fragment import glossary
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.wording import amount, duration, fixed, memory, percent, times, whole

__all__ = [
    "COLUMNS", "Cell", "Column", "best_value", "cell_of", "columns_with_data", "full_label", "group_name",
    "is_level",
]  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One score.

    Attributes:
        key: Key in results.json.
        label: Short name.
        group: Topic; adjacent columns of one group share a heading.
        higher: Whether higher is better; None if neither direction is.
        show: Formats a value.
        main: Whether it is in the table at the top of the page, not only in the full one.
        entry: Its entry in the glossary; the key if empty.
    """

    key: str
    label: str
    group: str
    higher: bool | None
    show: Callable[[float], str]
    main: bool = True
    entry: str = ""

    @property
    def meaning(self) -> str:
        """One or two plain sentences."""
        return glossary()["scores"][self.entry or self.key]

    @property
    def direction(self) -> str:
        """Which direction is better, in words."""
        return {True: "higher is better", False: "lower is better", None: ""}[self.higher]

    @property
    def arrow(self) -> str:
        """Which direction is better, as an arrow."""
        return {True: "↑", False: "↓", None: ""}[self.higher]


_percent = partial(percent, decimals=2)


def _amount(value: float) -> str:
    """Format a score in the units of the target."""
    return whole(value) if abs(value) >= 1000 else fixed(value, 4)


_area, _error, _small = (partial(fixed, decimals=decimals) for decimals in (3, 4, 5))
_QUALITY, _ERRORS, _UNFAMILIAR, _COST = "Quality", "Errors", "Unfamiliar inputs", "Cost"

COLUMNS: tuple[Column, ...] = (
    Column("accuracy", "Accuracy", _QUALITY, True, _percent),
    Column("mean_iou", "mean IoU", _QUALITY, True, _area),
    Column("rmse", "RMSE", _QUALITY, False, _amount),
    Column("crps", "CRPS", _QUALITY, False, _amount),
    Column("coverage90", "In 90 %", _QUALITY, None, _percent),
    Column("nll", "NLL", _QUALITY, False, _error),
    Column("ece", "ECE", _QUALITY, False, _error),
    Column("ece_equal_mass", "ECE, equal mass", _QUALITY, False, _error, main=False),
    Column("mce", "MCE", _QUALITY, False, _error, main=False),
    Column("brier", "Brier", _QUALITY, False, _error),
    Column("auroc_misclassification", "AUROC", _ERRORS, True, _area),
    Column(
        "auroc_misclassification_entropy", "AUROC errors, entropy", _ERRORS, True, _area, main=False
    ),
    Column("aurc", "AURC", _ERRORS, False, _small, main=False),
    Column("auroc_ood", "AUROC entropy", _UNFAMILIAR, True, _area),
    Column("auroc_ood_mutual_information", "AUROC mutual inf.", _UNFAMILIAR, True, _area),
    Column("auroc_ood_confidence", "AUROC confidence", _UNFAMILIAR, True, _area, main=False),
    Column("auroc_noise", "AUROC noise", _UNFAMILIAR, True, _area),
    Column("fpr95_ood", "FPR95", _UNFAMILIAR, False, _percent),
    Column("seconds_per_epoch", "Time / epoch", _COST, False, duration),
    Column("seconds", "Time", _COST, False, duration, main=False),
    Column("peak_memory", "Peak memory", _COST, False, memory),
    Column("stored", "Stored", _COST, False, amount),
    Column("parameters", "Parameters", _COST, None, whole, main=False),
)


# What differs where numbers are predicted, which have no entropy.
_OF_NUMBERS: dict[str, dict[str, Any]] = {
    "auroc_ood": {"label": "AUROC spread", "entry": "auroc_ood_numbers"}
}


def columns_with_data(methods: Sequence[MethodResult], main: bool) -> list[Column]:
    """Return the columns in which at least one method has a value.

    Args:
        methods: The rows.
        main: Whether to keep only the columns of the table at the top.
    """
    numbers = any(m.scores.get("rmse") is not None for m in methods)
    return [
        replace(column, **_OF_NUMBERS.get(column.key, {})) if numbers else column
        for column in COLUMNS
        if (column.main or not main) and any(m.scores.get(column.key) is not None for m in methods)
    ]


def group_name(group: str, results: Results) -> str:
    """Return the heading of a group of columns, which says what the unfamiliar inputs are."""
    return f"{group}: {results.ood}" if group == _UNFAMILIAR and results.ood else group


def full_label(column: Column, results: Results) -> str:
    """Return a column's name for a table without headings of groups."""
    if column.group == _ERRORS:
        return f"{column.label} errors"
    if column.group == _UNFAMILIAR and column.key != "auroc_noise" and results.ood:
        return f"{column.label}, {results.ood}"
    return column.label


def best_value(column: Column, methods: Sequence[MethodResult]) -> float | None:
    """Return the best value of a column; None if neither end is better or all values look the same."""
    values = [value for m in methods if (value := m.scores.get(column.key)) is not None]
    if column.higher is None or len({column.show(value) for value in values}) < 2:
        return None
    return max(values) if column.higher else min(values)


def is_level(column: Column, method: MethodResult, methods: Sequence[MethodResult]) -> bool:
    """Whether seeds alone could explain a method's distance from the best one.

    True if both have a spread and their means are at most two standard errors of the difference apart.
    """
    best, value = best_value(column, methods), method.scores.get(column.key)
    if best is None or value is None:
        return False
    champion = next(m for m in methods if m.scores.get(column.key) == best)
    variances = [
        spread**2 / len(m.runs)
        for m in (method, champion)
        if (spread := m.spread.get(column.key)) is not None and len(m.runs) > 1
    ]
    return len(variances) == 2 and abs(value - best) <= 2 * math.sqrt(sum(variances))


@dataclass(frozen=True)
class Cell:
    """One value of the table.

    Attributes:
        value: Full-precision value, or None if it is undefined.
        text: The value as displayed.
        spread: Standard deviation over seeds as displayed, or empty.
        best: Whether no method is better at the displayed precision.
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
    """Return a method's cell in a column."""
    value, spread = method.scores.get(column.key), method.spread.get(column.key)
    if value is None:
        return Cell(None, "–")
    best = best_value(column, results.methods)
    first = best is not None and column.show(value) == column.show(best)
    level = not first and is_level(column, method, results.methods)
    if column.group != _COST:
        shown = "" if spread is None else column.show(spread).rstrip("\u202f%")
        return Cell(value, column.show(value), shown, first, level)
    base = (baseline := results.find("map")) and baseline.scores.get(column.key)
    aside = f"{times(value / base)} map" if base and base > 0 else ""
    return Cell(value, column.show(value), "", first, level, aside)
