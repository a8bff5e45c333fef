"""How the commands answer: JSON for scripts, tables and lines of text for people."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["answer", "cell", "notice", "plain", "table"]


def table(
    title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]], *, left: int = 1
) -> Table:
    """Build a table of numbers.

    Args:
        title: Title, or None.
        columns: Headings.
        rows: Cells of each row.
        left: Number of columns, from the left, that hold text and are aligned left.
    """
    result = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        result.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def cell(value: float | None, style: str) -> str:
    """Format a number, without decimals if it is large, or a dash where there is none."""
    if value is None:
        return "–"
    return format(value, ",.0f" if style.endswith("f") and abs(value) >= 1000 else style)


def plain(text: str) -> str:
    r"""Return a name from a file so that it is printed as it is: no markup, no control characters.

    Example:
        >>> print(plain("[red]\x1b[31m"))
        \[red]\x1b[31m
    """
    return escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def notice(text: str, as_json: bool) -> None:
    """Print a remark before a long computation, unless a script reads the output."""
    if not as_json:
        Console(highlight=False).print(plain(text), style="dim", soft_wrap=True)


def answer(result: Any, as_json: bool, *parts: Table | str) -> None:
    """Print the result as JSON, or else the parts, one below the other."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    console = Console(highlight=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
