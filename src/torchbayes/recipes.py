"""Where the recipes are: TOML files that carry every setting of an experiment."""

from __future__ import annotations

from pathlib import Path

__all__ = ["find_recipe", "recipe_folder"]


def recipe_folder() -> Path:
    """The folder of recipes: inside an installed package, beside `src` in a checkout."""
    here = Path(__file__).resolve().parent
    inside = here / "_recipes"
    return inside if inside.is_dir() else here.parents[1] / "recipes"


def find_recipe(name: str) -> Path:
    """The file of the recipe `paper/name`.

    Raises:
        ValueError: If there is none.
    """
    file = recipe_folder() / f"{name}.toml"
    if not file.is_file():
        known = sorted(
            p.relative_to(recipe_folder()).with_suffix("") for p in recipe_folder().rglob("*.toml")
        )
        raise ValueError(
            f"there is no recipe {name!r}: choose one of {', '.join(map(str, known)) or '(none installed)'}"
        )
    return file
