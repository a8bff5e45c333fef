"""The options that several commands share, and `name=value` pairs."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args

import typer

from torchbayes.experiments.options import option_names
from torchbayes.experiments.settings import Experiment, check_keys, recipe_settings
from torchbayes.train.registry import find_method, method_options

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
    """Return the value of a method's option, in the type that the option has."""
    known, names = method_options(find_method(method)), option_names(find_method(method))
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        raise ValueError(f"method {method!r} has no option {name!r}: {hint}")
    kind = known[name].type if name in known else float
    union = isinstance(kind, UnionType)
    kinds, value = get_args(kind) if union else (kind,), _plain(text)
    if str in kinds:
        return text
    if float in kinds and type(value) is int:
        return float(value)
    plain = set(kinds) <= {int, float, bool, type(None)}
    if plain and type(value) not in kinds:
        wanted = " or ".join(k.__name__ for k in kinds if k is not type(None))
        raise ValueError(f"option {name} of {method!r} is {text!r}: expected {wanted}")
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
        takers = [r for r, m in methods.items() if name in option_names(find_method(m))]
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
    check_keys(others, {f.name: f for f in dataclasses.fields(Experiment)}, "--setting")
    settings |= {name: _plain(value) for name, value in others.items()}
    if model_set:
        pairs = dict(_split(pair, "--model-set") for pair in model_set)
        given = {name: _plain(value) for name, value in pairs.items()}
        settings["model_options"] = {**settings.get("model_options", {}), **given}
    unknown = (
        settings.keys() - {f.name for f in dataclasses.fields(Experiment)} - {"methods", "rows"}
    )
    assert not unknown, unknown
    return settings
