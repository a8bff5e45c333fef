"""`torchbayes methods`, `models` and `data`: what is available."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from torchbayes.cli.options import DataDir, Json
from torchbayes.cli.output import answer

if TYPE_CHECKING:
    from torchbayes.train.registry import Option

__all__ = ["data", "methods", "models"]


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold", style="bold" if column == "name" else "")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    answer(rows, as_json, table)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show the options of this method.")] = None,
    train_size: Annotated[
        int, typer.Option(help="Training examples for which computed defaults are shown.")
    ] = 50_000,
    as_json: Json = False,
) -> None:
    """List the methods, or one method's options with their defaults."""
    from torchbayes.optim.cold import EXACT, LEAST
    from torchbayes.optim.sampler import Sampler
    from torchbayes.train.registry import METHODS, find_method, method_options, values_in_use

    if name is None:
        rows = [{"name": n, "what it is": m.summary, "from": m.paper} for n, m in METHODS.items()]
        _show(rows, as_json)
        return
    method = find_method(name)
    if not as_json:
        typer.echo(f"{name}: {method.summary} ({method.paper})\n")
    in_use = values_in_use(method, train_size)
    options = method_options(method).values()
    rows = [{"name": o.name, "default": _default(o, in_use), "meaning": o.meaning} for o in options]
    _show(rows, as_json)
    if in_use and not as_json:
        typer.echo(f"\nComputed defaults are for {train_size:,} training examples (--train-size).")
    if issubclass(method.algorithm, Sampler) and not as_json:
        typer.echo(
            f"\nWith {train_size:,} training examples (--train-size) the temperature is 1 for up to "
            f"{EXACT * train_size:,} weights; for a larger number D it is ({EXACT * train_size:,}/D)², but "
            f"no less than {LEAST:g}."
        )


def _default(option: Option, in_use: dict[str, Any]) -> str:
    if option.default is None and option.name in in_use:
        return f"computed: {in_use[option.name]:.4g}"
    return getattr(option.default, "__name__", str(option.default))


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
