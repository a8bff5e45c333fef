"""In what a recipe differs now from what its record was measured with: the page says it in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchbayes.core.reading import read_toml
from torchbayes.experiments.compare import recipe_rows
from torchbayes.experiments.recipes import recipe_settings
from torchbayes.experiments.record import Record
from torchbayes.experiments.settings import SETTINGS

__all__ = ["changes_since"]

_TABLES = ("model_options", "options", "table")
_DEFAULT_THEN, _DEFAULT = "the default then", "the default"


def changes_since(folder: Path, records: Mapping[str, Record]) -> dict[str, str]:
    """Return a sentence for every record whose recipe says something else now, or is gone.

    Args:
        folder: Folder of the recipes.
        records: What was measured, by recipe.
    """
    found = {}
    for name, record in records.items():
        file = folder / f"{name}.toml"
        if not file.exists():
            found[name] = "The recipe is gone."
        elif changed := _changes(file, record):
            found[name] = f"The recipe has changed since: {'; '.join(changed)}."
    return found


def _changes(file: Path, record: Record) -> list[str]:
    base, rows = recipe_rows(recipe_settings(file, cpu=record.size == "cpu"))
    tasks = read_toml(file).get("continual")
    if tasks is not None:  # its rows are fixed by the command
        return _differences(record.settings, base.settings() | tasks)
    by_change: dict[str, list[str]] = {}
    for row in rows:
        if row.name in record.rows:
            was = {**record.settings, **record.own.get(row.name, {})}
            changed = ", ".join(_differences(was, row.experiment.settings()))
            by_change.setdefault(changed, []).append(row.name)
    by_change.pop("", None)
    said = [f"{_names(names)}: {changed}" for changed, names in by_change.items()]
    now = [row.name for row in rows]
    new = [name for name in now if name not in record.rows]
    gone = [name for name in record.rows if name not in now]
    said += [f"{_names(new)} added"] if new else []
    return said + ([f"{_names(gone)} removed"] if gone else [])


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that differ. What a record does not have had the default of its version."""
    was, now = _plain({**SETTINGS, "method": now["method"], **was}), _plain({**SETTINGS, **now})
    said = [
        _difference(key, was.get(key), now.get(key))
        for key in sorted((was.keys() | now.keys()) - {"seed", *_TABLES})
    ]
    for key in _TABLES:
        before, after = _spelled_now(was.get(key, {})), now.get(key, {})
        said += [
            _difference(name, before.get(name, _DEFAULT_THEN), after.get(name, _DEFAULT))
            for name in sorted(before.keys() | after.keys())
        ]
    return [line for line in said if line]


def _difference(name: str, was: Any, now: Any) -> str:
    return "" if was == now else f"`{name}` was {_shown(was)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    return "not set" if value in ("", None) else f"{value}"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON holds them."""
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _spelled_now(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a record in today's spelling."""
    found = dict(options)
    if found.get("prior") == "mixture":
        found["prior"] = {"mixture": {key: found.pop(key) for key in ("pi", "std1", "std2")}}
    if "prior_precision" in found:
        found["prior"] = found.pop("prior_precision")
    if "beta1" in found and "beta2" in found:
        found["betas"] = [found.pop("beta1"), found.pop("beta2")]
    return found
