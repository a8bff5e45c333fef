"""Recipes: TOML files with all settings of an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchbayes.core.reading import read_toml
from torchbayes.experiments.settings import SETTINGS, check_keys

__all__ = ["find_recipe", "recipe_folder", "recipe_names", "recipe_settings"]

_FOR_COMPARE = ("methods", "rows")
_FOR_READERS = ("title", "paper", "note", "reported", "after", "continual")


def recipe_folder() -> Path:
    """Return the folder of recipes: inside an installed package, beside `src` in a checkout."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "_recipes"
    return inside if inside.is_dir() else here.parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Return the names of all recipes, `paper/name`."""
    files = recipe_folder().glob("*/*.toml")
    return sorted(f.relative_to(recipe_folder()).with_suffix("").as_posix() for f in files)


def find_recipe(name: str) -> Path:
    """Return the file of the recipe `paper/name`, or raise a `ValueError`."""
    if name not in recipe_names():
        raise ValueError(
            f"there is no recipe {name!r}: choose one of {', '.join(recipe_names()) or '(none installed)'}"
        )
    return recipe_folder() / f"{name}.toml"


def recipe_settings(path: Path, *, cpu: bool = False) -> dict[str, Any]:
    """Return the settings of a recipe: its top-level keys, with its [cpu] table merged in if asked for.

    `title`, `paper` and the [reported] table are for readers, [methods] and [rows] for `compare`.
    """
    table = read_toml(path)
    check_keys(table, [*SETTINGS, *_FOR_READERS, *_FOR_COMPARE, "cpu"], str(path))
    overrides = table.pop("cpu", {})
    for name, part in (("cpu", overrides), ("continual", table.get("continual", {}))):
        if not isinstance(part, dict):
            raise ValueError(f"{path}: {name} is {part!r}, expected a table, [{name}]")
    check_keys(overrides, [*SETTINGS, *_FOR_COMPARE], f"{path}, [cpu]")
    if cpu:
        table = _merged(table, overrides)
    return {key: value for key, value in table.items() if key not in _FOR_READERS}


def _merged(table: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge the values of `over` into a copy of `table`, recursively."""
    result = dict(table)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result
