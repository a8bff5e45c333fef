"""Where the recipes are: TOML files that carry every setting of an experiment."""

from __future__ import annotations

from pathlib import Path

__all__ = ["find_recipe", "recipe_folder", "recipe_names"]


def recipe_folder() -> Path:
    """The folder of recipes: inside an installed package, beside `src` in a checkout."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "_recipes"
    return inside if inside.is_dir() else here.parents[1] / "recipes"


def recipe_names() -> list[str]:
    """The names of all recipes, `paper/name`."""
    files = recipe_folder().glob("*/*.toml")
    return sorted(f.relative_to(recipe_folder()).with_suffix("").as_posix() for f in files)


def find_recipe(name: str) -> Path:
    """The file of the recipe `paper/name`.

    Raises:
        ValueError: If there is none.
    """
    if name not in recipe_names():
        raise ValueError(
            f"there is no recipe {name!r}: choose one of {', '.join(recipe_names()) or '(none installed)'}"
        )
    return recipe_folder() / f"{name}.toml"
