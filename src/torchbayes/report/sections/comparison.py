"""The table: quality, doubt, unfamiliar inputs and cost of every method, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from torchbayes.report.columns import (
    Column,
    best_value,
    columns_with_data,
    is_best,
    is_level,
)
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.sections.cost import cost_chart
from torchbayes.report.wording import times

__all__ = ["comparison_section", "markdown_table"]


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


def comparison_section(results: Results) -> Section | None:
    """The table, what the methods are, cost against quality, and every run."""
    if not results.methods:
        return None
    columns = columns_with_data(results.methods, main=True)
    body = render(
        "comparison.html.j2",
        results=results,
        columns=columns,
        groups=[(name, len(list(group))) for name, group in groupby(columns, lambda c: c.group)],
        rows=[(m, [_cell(c, m, results) for c in columns]) for m in results.methods],
        seeds=max(len(method.runs) for method in results.methods),
        cost=cost_chart(results),
        run_columns=columns_with_data(results.methods, main=False),
    )
    return Section("comparison", "Table", "Side by side", body)


def markdown_table(results: Results) -> str:
    """The table as Markdown, for a README or a pull request; the best values are bold.

    Args:
        results: What `load_results` read.
    """
    columns = columns_with_data(results.methods, main=True)
    lines = [
        ["method", *(f"{c.label} {c.arrow}".strip() for c in columns)],
        ["---", *("---:" for _ in columns)],
    ]
    for method in results.methods:
        row = [method.name]
        for column in columns:
            cell = _cell(column, method, results)
            text = f"{cell.text} ± {cell.spread}" if cell.spread else cell.text
            row.append(f"**{text}**" if cell.best else text)
        lines.append(row)
    return "".join("| " + " | ".join(_plain(cell) for cell in line) + " |\n" for line in lines)


def _plain(text: str) -> str:
    """Text that cannot end a cell of a Markdown table or start an element."""
    text = " ".join(text.split()).replace("\u202f", " ")
    for sign, safe in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|")):
        text = text.replace(sign, safe)
    return text


def _cell(column: Column, method: MethodResult, results: Results) -> Cell:
    value, spread = method.scores.get(column.key), method.spread.get(column.key)
    if value is None:
        return Cell(None, "–")
    best = best_value(column, [row.scores for row in results.methods])
    first = is_best(column, value, best)
    return Cell(
        value,
        column.show(value),
        "" if spread is None or column.key == "seconds" else column.show(spread).rstrip("\u202f%"),
        first,
        not first and is_level(column, method, results.methods),
        _relative(value, results) if column.key == "seconds" else "",
    )


def _relative(seconds: float, results: Results) -> str:
    baseline = results.find("map")
    base = None if baseline is None else baseline.scores.get("seconds")
    return "" if base is None or base <= 0 else f"{times(seconds / base)} map"
