"""How the commands answer: JSON for scripts, tables and lines of text for people."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["answer", "cell", "notice", "resumable", "table", "visible", "visible_notices"]


def visible(text: str) -> str:
    r"""Return text in which no character can steer the terminal; those that would are shown as escapes.

    Names of classes, files and rows may come from anywhere, and a terminal obeys escape sequences.

    Example:
        >>> visible("a\x1b[31mb")
        'a\\x1b[31mb'
    """
    return "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


@contextmanager
def visible_notices() -> Iterator[None]:
    """Show what steers a terminal in warnings and log lines, too: they quote files."""

    class Visible(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return visible(super().format(record))

    def formatted(*message: Any, **more: Any) -> str:
        return visible(before(*message, **more))

    before, last = warnings.formatwarning, logging.lastResort
    warnings.formatwarning = formatted
    if last is not None:  # where a line goes for which nobody has made a handler
        last.setFormatter(Visible())
    try:
        yield
    finally:
        warnings.formatwarning = before
        if last is not None:
            last.setFormatter(None)


@contextmanager
def resumable(kept: str) -> Iterator[None]:
    """Have Ctrl-C say what is kept: training in the block has no folder of its own, and says nothing is."""
    try:
        yield
    except KeyboardInterrupt as stop:
        said = str(stop)
        if "resume" not in said:
            said = f"{said.partition(';')[0] or 'stopped'}; {kept}: start it again with --resume to continue"
        raise KeyboardInterrupt(said) from None


def table(
    title: str | None,
    columns: Iterable[str],
    rows: Iterable[Iterable[str | Text]],
    *,
    left: int = 1,
) -> Table:
    """Build a table of numbers.

    Args:
        title: Title, or None.
        columns: Headings.
        rows: Cells of each row; text is shown as it is, without markup.
        left: Number of columns, from the left, that hold text and are aligned left.
    """
    heading = None if title is None else Text(visible(title))
    result = Table(title=heading, title_justify="left")
    for number, column in enumerate(columns):
        justify = "left" if number < left else "right"
        result.add_column(Text(visible(column)), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        result.add_row(*(Text(visible(c)) if isinstance(c, str) else c for c in row))
    return result


def cell(value: float | None, style: str) -> str:
    """Format a number, without decimals if it is large, or a dash where there is none."""
    if value is None:
        return "–"
    return format(value, ",.0f" if style.endswith("f") and abs(value) >= 1000 else style)


def notice(text: str, as_json: bool) -> None:
    """Print a remark before a long computation, unless a script reads the output."""
    if not as_json:
        Console(highlight=False).print(Text(visible(text)), style="dim", soft_wrap=True)


def answer(result: Any, as_json: bool, *parts: Table | Text | str) -> None:
    """Print the result as JSON, or else the parts, one below the other; text is shown without markup."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    console = Console(highlight=False)
    for part in parts:
        text = Text(visible(part)) if isinstance(part, str) else part
        console.print(text, soft_wrap=isinstance(text, Text))
