"""Optional files of a run folder beside scores and predictions.

draws.json          scores of the average over the first 1, 2, 4, … draws       (evaluate)
corruptions.json    scores on damaged test images                              (evaluate --corruptions)
config.toml         options of the method                                      (train)
calibration.json    temperature, prediction sets and abstention, before/after  (calibrate)
diagnosis.json      numbers on convergence, such as rhat                       (diagnose)
pictures/           pictures with captions                                     (several commands)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchbayes.core.reading import is_number, read_json
from torchbayes.report.attach import Picture, read_pictures
from torchbayes.train.run_folder import RunFolder

__all__ = ["Calibration", "Extras", "finite_numbers", "read_extras"]

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Calibration:
    """Corrections after training.

    Attributes:
        fitted_on: Examples used for fitting, in words.
        scored_on: Examples used for scoring, in words.
        temperature: Temperature of the scaled probabilities.
        before: Scores before scaling.
        after: Scores after scaling.
        conformal: For each requested coverage: target, coverage and mean_size.
        abstention: For each requested risk: target, coverage and, if anything was answered, risk.
        intervals: For a regression, by kind of interval, for each requested coverage: target, coverage and
            width.
    """

    fitted_on: str
    scored_on: str
    temperature: float | None
    before: Numbers
    after: Numbers
    conformal: tuple[Numbers, ...]
    abstention: tuple[Numbers, ...]
    intervals: Mapping[str, tuple[Numbers, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Extras:
    """The optional parts of a run.

    Attributes:
        draws: Rows of draws, nll and accuracy, from one draw to all.
        corruptions: For each kind of damage, rows of severity (0 is none), accuracy, nll and ece.
        corruption_note: What was damaged, and how.
        calibration: Corrections after training, or None.
        rhat: Largest R-hat, or None.
        pictures: Pictures of the run.
        options: Options of the method, from config.toml.
    """

    draws: tuple[Numbers, ...] = ()
    corruptions: Mapping[str, tuple[Numbers, ...]] = field(default_factory=dict)
    corruption_note: str = ""
    calibration: Calibration | None = None
    rhat: float | None = None
    pictures: tuple[Picture, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def read_extras(run: Path, problems: list[str]) -> Extras:
    """Read the optional files of a run folder.

    Args:
        run: Run folder.
        problems: List that receives a sentence for each damaged file.
    """

    def read(name: str, make: Callable[[Any], Any], default: Any) -> Any:
        file = run / name
        if not file.is_file():
            return default
        try:
            return make(read_json(file, "it is not shown"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            problems.append(f"{file} is damaged and not shown.")
            return default

    kinds, note = read("corruptions.json", _corruptions, ({}, ""))
    return Extras(
        draws=read("draws.json", _rows, ()),
        corruptions=kinds,
        corruption_note=note,
        calibration=read("calibration.json", _calibration, None),
        rhat=read("diagnosis.json", _rhat, None),
        pictures=read_pictures(run, problems),
        options=_options(run, problems),
    )


def _options(run: Path, problems: list[str]) -> Mapping[str, Any]:
    """Return the options of the run's method, as far as config.toml has them."""
    files = RunFolder(run)
    try:
        found = files.read_config().get("options", {}) if files.config_file.exists() else {}
    except (OSError, ValueError) as error:
        problems.append(str(error))
        return {}
    return found if isinstance(found, dict) else {}


def finite_numbers(table: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a table that are finite numbers."""
    return {
        key: float(value)
        for key, value in table.items()
        if is_number(value) and math.isfinite(value)
    }


def _rows(table: Any) -> tuple[Numbers, ...]:
    # Older versions wrote the list alone, which carries no checksum.
    return tuple(map(finite_numbers, table["rows"] if isinstance(table, dict) else table))


def _corruptions(table: Mapping[str, Any]) -> tuple[dict[str, tuple[Numbers, ...]], str]:
    clean = {**finite_numbers(table["clean"]), "severity": 0.0}
    kinds: dict[str, tuple[Numbers, ...]] = {
        kind: (clean, *map(finite_numbers, rows)) for kind, rows in table["kinds"].items()
    }
    if any("severity" not in row for rows in kinds.values() for row in rows):
        raise ValueError("a row has no severity")
    note = table.get("note", "")
    examples = table.get("examples")
    many = f" {examples:,} test images of each." if isinstance(examples, int) else ""
    draws = table.get("draws")
    if isinstance(draws, int) and draws > 1:
        many += f" Predicted with at most {draws} draws."
    return kinds, f"{note if isinstance(note, str) else ''}{many}".strip()


def _calibration(table: Mapping[str, Any]) -> Calibration:
    kinds: dict[str, tuple[Numbers, ...]] = {}
    for row in table.get("intervals", ()):
        kind = str(row["score"] or "own")
        kinds[kind] = (*kinds.get(kind, ()), finite_numbers(row))
    # A regression has intervals in place of all else.
    scaling = {"value": None, "before": {}, "after": {}} if kinds else table["temperature"]
    return Calibration(
        str(table.get("fitted_on", "held-out examples")),
        str(table.get("scored_on", "the test split")),
        None if scaling["value"] is None else float(scaling["value"]),
        finite_numbers(scaling["before"]),
        finite_numbers(scaling["after"]),
        tuple(map(finite_numbers, table.get("conformal", ()))),
        tuple(map(finite_numbers, table.get("abstention", ()))),
        kinds,
    )


def _rhat(table: Any) -> float | None:
    return max(filter(math.isfinite, _rhats(table)), default=None)


def _rhats(value: Any, inside: bool = False) -> Iterator[float]:
    """Yield all numbers below a key that names R-hat."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _rhats(item, inside or "rhat" in str(key).lower().replace("_", ""))
    elif isinstance(value, list):
        for item in value:
            yield from _rhats(item, inside)
    elif inside and isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)
