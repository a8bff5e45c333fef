"""Options that several commands share, and `name=value` pairs.

Neither this module nor the commands' modules import torch before a command runs, so that help and usage
errors appear at once. An option that is not given has the recipe's value or the default shown in the help.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand

__all__ = [
    "Augment", "BatchSize", "Cpu", "Data", "DataDir", "Device", "Drop", "Epochs", "Init", "Json", "Model",
    "ModelSet", "Recipe", "RunFolder", "RunSamples", "Samples", "ScheduleName", "Seed", "Set", "Settings",
    "TableSplit", "Target", "Task", "TestShare", "TrainingCommand", "method_pairs", "numbers",
    "searched", "settings_from",
]  # fmt: skip

Recipe = Annotated[Path | None, typer.Option(help="TOML file of settings; flags override it.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Use the recipe's CPU-sized version.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Data set (`torchbayes data` lists them), folder:PATH with images, or table:FILE.csv.",
        show_default="digits",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Network; `torchbayes models` lists them.",
        show_default="mlp for digits, moons, curves and tables, lenet5 for images",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="Of a table: column to predict, by name or number (from 0, negative from the end).",
        show_default="the last",
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="Of a table: classification or regression.", show_default="found from the target"
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(help="Of a table: a column to leave out, by name or number; repeatable."),
]
TableSplit = Annotated[
    str | None,
    typer.Option(
        "--split",
        help="Of a table: seed of the random choice of test rows (for uci:…, the number of the published "
        "split), a file with their numbers from 0, or `seed` for other rows with every seed.",
        show_default="0",
    ),
]
TestShare = Annotated[
    float | None,
    typer.Option(help="Of a table: share of the rows to test on.", show_default="0.2"),
]
Epochs = Annotated[
    int | None, typer.Option(help="Passes through the training set.", show_default="30")
]
BatchSize = Annotated[int | None, typer.Option(help="Examples per update.", show_default="64")]
Samples = Annotated[
    int | None, typer.Option(help="Posterior draws to predict with.", show_default="32")
]
RunSamples = Annotated[
    int | None, typer.Option(help="Posterior draws to predict with.", show_default="the run's own")
]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.")]
Augment = Annotated[
    bool | None,
    typer.Option(
        "--augment/--no-augment", help="The data set's usual augmentation.", show_default="no"
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        help="Learning-rate schedule: constant, cosine, linear, step, cyclic or polynomial; its details are "
        "given by --setting: milestones, gamma, warmup_epochs, cycles, low, power, offset.",
        show_default="constant",
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="An option of the method, such as --set lr=0.01; repeatable. `torchbayes methods NAME` lists "
        "them.",
    ),
]
ModelSet = Annotated[
    list[str] | None,
    typer.Option(help="An option of the network, such as --model-set hidden=[64,64]; repeatable."),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="TORCHBAYES_DATA",
        help="Folder that already has the data files; otherwise they are downloaded to a cache.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device to compute on, such as cpu, cuda or cuda:1; under torchrun cuda is each process's own.",
        show_default="the machine's accelerator, or else cpu",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        help="Any other setting that a recipe can have, such as --setting clip_norm=1 or --setting "
        "milestones=[80,120]; repeatable.",
    ),
]
Init = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Start from the weights in a safetensors file: a state dict, or the mean of a run's posterior. "
        "Repeat it for the members of an ensemble. "
        "A new layer starts from random weights with --setting 'reset=[\"NAME\"]'.",
        show_default="random weights",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts to read.")]

Number = TypeVar("Number", int, float)


class TrainingCommand(TyperCommand):
    """A command that explains how to give a method's option, such as --lr, that it does not have itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; for an unknown option, explain how to give a method's options."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Some versions of Typer bundle a copy of click: the class is not always click's own.
            if type(error).__name__ != "NoSuchOption":
                raise
            flag: str = error.option_name  # type: ignore[attr-defined]
            own = [opt for parameter in self.params for opt in parameter.opts]
            if not flag.startswith("--") or difflib.get_close_matches(flag, own, cutoff=0.8):
                raise
            pair = f"{flag[2:].replace('-', '_')}={_value_of(flag, given)}"
            raise ValueError(
                f"{ctx.info_name} has no option {flag}: use --set {pair} for an option of the method, "
                f"--setting {pair} for a setting of a recipe"
            ) from None


def _value_of(flag: str, words: Sequence[str]) -> str:
    """Return the value that the user gave to an unknown flag."""
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and not following.startswith("-"):
            return following
    return "VALUE"


def numbers(text: str, kind: Callable[[str], Number], name: str, expected: str) -> list[Number]:
    """Read comma-separated numbers.

    Example:
        >>> numbers("1,4,16", int, "times", "whole numbers such as 1,4")
        [1, 4, 16]
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}: expected {expected}") from None


def _split(pair: str, flag: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{flag} {pair!r} is not of the form name=value, such as lr=0.01")
    return name.strip(), value.strip()


def _plain(text: str) -> Any:
    """Read a number, a boolean or a list if the text is one, otherwise keep the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _typed(method: str, name: str, text: str) -> Any:
    """Return the value of a method's option in the option's type."""
    from torchbayes.experiments.options import option_names
    from torchbayes.train.registry import check_options, find_method, method_options

    found = find_method(method)
    if name not in option_names(found):
        check_options(found, [name])
    known, value = method_options(found), _plain(text)
    if name == "params":  # an argument of fit: one pattern or a list of them
        return value
    kind = known[name].type if name in known else float  # a number of epochs
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if str in kinds:
        return text
    if float in kinds and type(value) is int:
        return float(value)
    if set(kinds) <= {int, float, bool, type(None)} and type(value) not in kinds:
        wanted = " or ".join(k.__name__ for k in kinds if k is not type(None))
        raise ValueError(f"option {name} of {method!r} is {text!r}: expected {wanted}")
    return value


def method_pairs(pairs: Sequence[str], methods: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Read `name=value`, for every method that has the option, and `row.name=value`, for one row.

    Args:
        pairs: Values of --set.
        methods: Method of each row; a row usually has the name of its method.
    """
    from torchbayes.experiments.options import option_names
    from torchbayes.train.registry import find_method

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
        for taker in takers or list(methods)[:1]:
            result[taker][name] = _typed(methods[taker], name, value)
    return result


def searched(pair: str) -> tuple[str, Sequence[Any]]:
    """Read what a search may try: a range, or a list of choices.

    Example:
        >>> searched("lr=0.001:0.1"), searched("rank=[5,10]")
        (('lr', (0.001, 0.1)), ('rank', [5, 10]))
    """
    name, text = _split(pair, "--space")
    low, colon, high = text.partition(":")
    values = (_plain(low), _plain(high)) if colon else _plain(text)
    numbers_only = colon and not all(type(v) in (int, float) for v in values)
    if numbers_only or not isinstance(values, (list, tuple)):
        raise ValueError(
            f"--space {pair!r} is neither a range such as {name}=0.001:0.1 nor a list such as {name}=[5,10]"
        )
    return name, values


def settings_from(
    recipe: Path | None,
    cpu: bool,
    model_set: Sequence[str] | None,
    setting: Sequence[str] | None,
    flags: Mapping[str, Any],
    table: Mapping[str, Any],
) -> dict[str, Any]:
    """Read a recipe's settings and override them by the flags that were given.

    Args:
        recipe: File of the recipe, or None.
        cpu: Whether to use its CPU-sized version.
        model_set: Values of --model-set.
        setting: Values of --setting.
        flags: Settings that have a flag of their own; None if it was not given.
        table: The same for the options of a table.
    """
    from torchbayes.experiments.recipes import recipe_settings
    from torchbayes.experiments.settings import SETTINGS, check_keys

    settings = {} if recipe is None else recipe_settings(recipe, cpu=cpu)
    settings |= {key: value for key, value in flags.items() if value is not None and value != []}
    others = _values(setting, "--setting")
    check_keys(others, SETTINGS, "--setting")
    settings |= others
    columns = {key: value for key, value in table.items() if value is not None and value != []}
    if columns:
        settings["table"] = {**settings.get("table", {}), **columns}
    if model_set:
        own = settings.get("model_options", {})
        settings["model_options"] = {**own, **_values(model_set, "--model-set")}
    return settings


def _values(pairs: Sequence[str] | None, flag: str) -> dict[str, Any]:
    return {name: _plain(value) for name, value in (_split(pair, flag) for pair in pairs or ())}
