"""The results of a comparison, as sections of the page use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.report.extras import Extras

__all__ = ["Images", "MethodResult", "Results", "Row", "RunResult", "Scored"]

Row = Mapping[str, float]
"""One epoch's numbers."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of a method.

    Attributes:
        seed: Its seed, or None if it was not noted.
        scores: Its scores; None where a score is undefined.
        history: One row of numbers for every epoch.
        extras: What else its folder holds.
    """

    seed: int | None
    scores: Mapping[str, float | None]
    history: tuple[Row, ...]
    extras: Extras = field(default_factory=Extras)


@dataclass(frozen=True, eq=False)
class MethodResult:
    """One method over all its seeds.

    Attributes:
        name: The method's name.
        index: Its place in the comparison: gives it one colour in all figures.
        summary: One line on what it does.
        paper: Where it is from.
        scores: Means over seeds; None where a score is undefined.
        spread: Standard deviations over seeds; empty with one seed.
        runs: The runs behind them.
        predictions: The predictions of the first run that has them, or None.
        seed: The seed of that run.
    """

    name: str
    index: int
    summary: str
    paper: str
    scores: Mapping[str, float | None]
    spread: Mapping[str, float | None]
    runs: tuple[RunResult, ...]
    predictions: Predictions | None
    seed: int | None


class Scored(NamedTuple):
    """A method and its value of a score it has."""

    value: float
    method: MethodResult


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures of the first test inputs and, if there are some, out-of-distribution inputs.

    Attributes:
        test: (examples, channels, height, width), uint8 or floating point.
        ood: The same, or None.
    """

    test: npt.NDArray[Any]
    ood: npt.NDArray[Any] | None


@dataclass(frozen=True, eq=False)
class Results:
    """A comparison: what was asked for, what came out, and what went wrong.

    Attributes:
        version: The torchbayes version that wrote it.
        created: When, as an ISO time; empty if unknown.
        data: Name of the data set.
        model: Name of the network.
        classes: Names of the classes.
        ood: Name of the out-of-distribution set, or None.
        notes: Sentences about the data.
        settings: The settings that all runs share.
        methods: The methods that finished, in the order they were asked for.
        failed: Why each method that failed did.
        images: Pictures of inputs, or None.
        problems: What could not be read and is therefore not shown, one sentence each.
    """

    version: str
    created: str
    data: str
    model: str
    classes: tuple[str, ...]
    ood: str | None
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    methods: tuple[MethodResult, ...]
    failed: Mapping[str, str]
    images: Images | None
    problems: tuple[str, ...]

    def find(self, name: str) -> MethodResult | None:
        """The method called `name`, if it is one of the comparison."""
        return next((method for method in self.methods if method.name == name), None)

    def scored(self, key: str) -> list[Scored]:
        """The methods that have the score `key`, with its value."""
        return [
            Scored(value, method)
            for method in self.methods
            if (value := method.scores.get(key)) is not None
        ]

    @property
    def predicted(self) -> tuple[tuple[MethodResult, Predictions], ...]:
        """The methods whose predictions could be read, with these."""
        return tuple((m, m.predictions) for m in self.methods if m.predictions is not None)

    def class_name(self, index: int) -> str:
        """The name of a class, its number if it has none."""
        return self.classes[index] if index < len(self.classes) else str(index)
