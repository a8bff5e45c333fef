"""`torchbayes methods`, `models` and `data`: what there is."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json

__all__ = ["data", "methods", "models"]


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold", style="bold" if column == "name" else "")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show the options of this method.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or one method's options with their defaults."""
    from torchbayes.train.methods import METHODS, find_method, method_options

    if name is None:
        rows = [{"name": n, "what it is": m.summary, "from": m.paper} for n, m in METHODS.items()]
        _show(rows, as_json)
        return
    method = find_method(name)
    if not as_json:
        typer.echo(f"{name}: {method.summary} ({method.paper})\n")
    rows = [
        {"name": o.name, "default": o.default, "meaning": meaning}
        for o in method_options(method).values()
        for meaning in [_meaning(method, o.name)]
    ]
    _show(rows, as_json)


def _meaning(method: type, option: str) -> str:
    """What the class's docstring says of an option."""
    found: list[str] = []
    for line in (method.__doc__ or "").splitlines():
        text = line.strip()
        if text.startswith(f"{option}:"):
            found.append(text.partition(":")[2].strip())
        elif found and line.startswith(" " * 12):
            found.append(text)
        elif found:
            break
    return " ".join(found)


def models(as_json: Json = False) -> None:
    """List the networks."""
    from torchbayes.models import MODELS

    _show(
        [{"name": n, "what it is": m.summary, "from": m.source} for n, m in MODELS.items()], as_json
    )


def data(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets and whether they are on this machine."""
    from torchbayes.data import DATASETS

    _show(
        [
            {"name": n, "here": "yes" if e.available(data_dir) else "no", "what it is": e.summary}
            for n, e in DATASETS.items()
        ],
        as_json,
    )
