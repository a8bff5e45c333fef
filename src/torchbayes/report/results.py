"""The results of a comparison as the sections of the page use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from torchbayes.experiments.saved_predictions import Predictions, RegressionPredictions
from torchbayes.report.extras import Extras

__all__ = ["Images", "MethodResult", "Results", "Row", "RunResult", "Scored"]

Row = Mapping[str, float]
"""Numbers of one epoch."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of a method.

    Attributes:
        seed: Random seed, or None if it was not recorded.
        scores: Scores; None where undefined.
        history: One row of numbers per epoch.
        extras: Optional files of its folder.
    """

    seed: int | None
    scores: Mapping[str, float | None]
    history: tuple[Row, ...]
    extras: Extras = field(default_factory=Extras)


@dataclass(frozen=True, eq=False)
class MethodResult:
    """One method over all its seeds.

    Attributes:
        name: Name of the method.
        index: Number of its mark: colour, shape and dashes in all figures.
        summary: One-line description.
        paper: Source.
        scores: Means over seeds; None where undefined.
        spread: Standard deviations over seeds; empty with one seed.
        runs: The individual runs.
        predictions: Predictions of the first run that has them, or None.
        seed: Seed of that run.
        values: Predicted values of the first run of a regression that has them, or None.
        point: Whether it is a point estimate: one network, not a posterior.
        first: Whether the page shows it before anything else is chosen.
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
    values: RegressionPredictions | None = None
    point: bool = False
    first: bool = True


class Scored(NamedTuple):
    """The value of a score and the method that has it."""

    value: float
    method: MethodResult


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures of the first test inputs and, if available, out-of-distribution inputs.

    Attributes:
        test: (examples, channels, height, width), uint8 or floating point.
        ood: The same, or None.
    """

    test: npt.NDArray[Any]
    ood: npt.NDArray[Any] | None


@dataclass(frozen=True, eq=False)
class Results:
    """A comparison: its settings, results and problems.

    Attributes:
        version: Version of torchbayes that wrote it.
        created: Time of creation in ISO format; empty if unknown.
        data: Name of the data set.
        model: Name of the network.
        classes: Names of the classes.
        ood: Name of the out-of-distribution set, or None.
        notes: Sentences about the data.
        settings: Settings shared by all runs.
        methods: Methods that finished, sorted by NLL.
        failed: Reason for each method that failed.
        images: Pictures of inputs, or None.
        problems: One sentence for each file that could not be read and is therefore not shown.
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
        """Return the method called `name`, or None."""
        return next((method for method in self.methods if method.name == name), None)

    def scored(self, key: str) -> list[Scored]:
        """Return the methods that have the score `key`, with its value."""
        return [Scored(v, m) for m in self.methods if (v := m.scores.get(key)) is not None]

    @property
    def posteriors(self) -> list[MethodResult]:
        """Methods that are no point estimates."""
        return [method for method in self.methods if not method.point]

    @property
    def predicted(self) -> tuple[tuple[MethodResult, Predictions], ...]:
        """Methods whose predictions could be read, with the predictions."""
        return tuple((m, m.predictions) for m in self.methods if m.predictions is not None)

    @property
    def valued(self) -> tuple[tuple[MethodResult, RegressionPredictions], ...]:
        """Methods whose predicted values could be read, with the values."""
        return tuple((m, m.values) for m in self.methods if m.values is not None)

    def class_name(self, index: int) -> str:
        """Return the name of a class, or its number if it has none."""
        return self.classes[index] if index < len(self.classes) else str(index)
