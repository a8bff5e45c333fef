"""The options that several commands share, and `name=value` pairs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from torchbayes.experiments.recipes import recipe_settings
from torchbayes.experiments.settings import SETTINGS, check_keys
from torchbayes.train.methods import find_method, method_options

__all__ = ["DataDir", "Json", "Settings", "method_pairs", "settings_from"]

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="TORCHBAYES_DATA",
        help="A folder that already has the data files; otherwise they are downloaded to a cache.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        help="Any other setting that a recipe can carry, such as --setting clip_norm=1; repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]


def _split(pair: str, flag: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{flag} {pair!r} is not of the form name=value, such as lr=0.01")
    return name.strip(), value.strip()


def _plain(text: str) -> Any:
    """A number, a truth value or a list where the text is one, otherwise the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _typed(method: str, name: str, text: str) -> Any:
    """The value of a method's option, in the type that the option has."""
    known = method_options(find_method(method))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        raise ValueError(f"method {method!r} has no option {name!r}: {hint}")
    kind, value = known[name].type, _plain(text)
    if kind is str:
        return text
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, bool) and type(value) is not kind:
        raise ValueError(f"option {name} of {method!r} is {text!r}: expected {kind.__name__}")
    return value


def method_pairs(pairs: Sequence[str], methods: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Take `name=value` (for every method that has it) and `row.name=value` apart.

    Args:
        pairs: What was given to --set.
        methods: The method of each row; a row is usually called like its method.
    """
    result: dict[str, dict[str, Any]] = {row: {} for row in methods}
    for pair in pairs:
        name, value = _split(pair, "--set")
        row, dot, option = name.partition(".")
        if dot:
            if row not in result:
                raise ValueError(f"--set {pair!r} is for {row!r}, which is not among the methods")
            result[row][option] = _typed(methods[row], option, value)
            continue
        takers = [r for r, m in methods.items() if name in method_options(find_method(m))]
        for taker in takers if takers else list(methods)[:1]:
            result[taker][name] = _typed(methods[taker], name, value)
    return result


def settings_from(
    recipe: Path | None,
    cpu: bool,
    model_set: Sequence[str],
    setting: Sequence[str],
    flags: dict[str, Any],
) -> dict[str, Any]:
    """The settings of a recipe with the flags that were given on top."""
    settings = {} if recipe is None else recipe_settings(recipe, cpu=cpu)
    settings |= {key: value for key, value in flags.items() if value is not None}
    others = dict(_split(pair, "--setting") for pair in setting)
    check_keys(others, SETTINGS, "--setting")
    settings |= {name: _plain(value) for name, value in others.items()}
    if model_set:
        pairs = dict(_split(pair, "--model-set") for pair in model_set)
        given = {name: _plain(value) for name, value in pairs.items()}
        settings["model_options"] = {**settings.get("model_options", {}), **given}
    unknown = settings.keys() - SETTINGS.keys() - {"methods", "rows"}
    assert not unknown, unknown
    return settings
