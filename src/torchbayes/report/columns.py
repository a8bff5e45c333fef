"""The scores that the page shows: their names, which direction is better, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torchbayes.report.results import MethodResult
from torchbayes.report.wording import amount, duration, fixed, memory, percent, whole

__all__ = ["COLUMNS", "Column", "best_value", "columns_with_data", "is_best", "is_level"]


@dataclass(frozen=True)
class Column:
    """One score.

    Attributes:
        key: Its key in results.json.
        label: Its short name.
        group: What it is about; neighbours of one group share a heading.
        higher: Whether more is better; None if neither is.
        show: Writes a value.
        meaning: One or two plain sentences.
        main: Whether it is in the table at the top of the page, not only in the full one.
    """

    key: str
    label: str
    group: str
    higher: bool | None
    show: Callable[[float], str]
    meaning: str
    main: bool = True

    @property
    def direction(self) -> str:
        """In words, which way is better."""
        return {True: "higher is better", False: "lower is better", None: ""}[self.higher]

    @property
    def arrow(self) -> str:
        """The same as a sign."""
        return {True: "↑", False: "↓", None: ""}[self.higher]


def _percent(value: float) -> str:
    return percent(value, 2)


def _error(value: float) -> str:
    return fixed(value, 4)


def _small(value: float) -> str:
    return fixed(value, 5)


def _area(value: float) -> str:
    return fixed(value, 3)


_QUALITY, _DOUBT, _FOREIGN, _COST = "Quality", "Errors", "Unfamiliar inputs", "Cost"

COLUMNS: tuple[Column, ...] = (
    Column(
        "accuracy",
        "Accuracy",
        _QUALITY,
        True,
        _percent,
        "The share of test examples whose most probable class is the right one.",
    ),
    Column(
        "rmse",
        "RMSE",
        _QUALITY,
        False,
        _error,
        "Root mean squared error of the predicted mean.",
    ),
    Column(
        "crps",
        "CRPS",
        _QUALITY,
        False,
        _error,
        "Continuous ranked probability score: how far the whole predicted distribution lies from what was "
        "observed, in the units of the target.",
    ),
    Column(
        "coverage90",
        "In 90 %",
        _QUALITY,
        None,
        _percent,
        "The share of test examples inside the predicted 90 % interval: 90 % is right.",
    ),
    Column(
        "nll",
        "NLL",
        _QUALITY,
        False,
        _error,
        "Negative log-likelihood: the surprise, in nats, at the right answer. It rewards being right "
        "and being honest about it, which makes it the best single score here.",
    ),
    Column(
        "ece",
        "ECE",
        _QUALITY,
        False,
        _error,
        "Expected calibration error: the average gap between how sure the method is and how often it "
        "is right, over 15 bins of equal width. 0.02 means it is off by two percentage points.",
    ),
    Column(
        "ece_equal_mass",
        "ECE, equal mass",
        _QUALITY,
        False,
        _error,
        "The same gap over 15 bins that hold equally many examples, so that no bin rests on a few.",
        main=False,
    ),
    Column(
        "mce",
        "MCE",
        _QUALITY,
        False,
        _error,
        "Maximum calibration error: the gap of the worst bin. A bin of few examples can make it large.",
        main=False,
    ),
    Column(
        "brier",
        "Brier",
        _QUALITY,
        False,
        _error,
        "The squared distance between the predicted probabilities and the truth: 0 is perfect, 2 is "
        "sure and wrong every time.",
    ),
    Column(
        "auroc_misclassification",
        "AUROC",
        _DOUBT,
        True,
        _area,
        "How well low confidence points at mistakes: the chance that a wrong prediction is less "
        "confident than a right one. 0.5 is a coin toss.",
    ),
    Column(
        "auroc_misclassification_entropy",
        "AUROC errors, entropy",
        _DOUBT,
        True,
        _area,
        "The same with entropy as the sign of doubt.",
        main=False,
    ),
    Column(
        "aurc",
        "AURC",
        _DOUBT,
        False,
        _small,
        "Area under the risk–coverage curve: the error rate that remains, averaged over how many of "
        "the least confident predictions are refused.",
        main=False,
    ),
    Column(
        "auroc_ood",
        "AUROC entropy",
        _FOREIGN,
        True,
        _area,
        "How well entropy tells unfamiliar inputs from test inputs: the chance that an unfamiliar one "
        "has more. Below 0.5 the method is surer about the unfamiliar.",
    ),
    Column(
        "auroc_ood_mutual_information",
        "AUROC mutual inf.",
        _FOREIGN,
        True,
        _area,
        "The same with mutual information: how far the drawn networks disagree. A single network has "
        "nothing to disagree with and scores 0.5.",
    ),
    Column(
        "auroc_ood_confidence",
        "AUROC confidence",
        _FOREIGN,
        True,
        _area,
        "The same with low confidence as the alarm.",
        main=False,
    ),
    Column(
        "auroc_noise",
        "AUROC noise",
        _FOREIGN,
        True,
        _area,
        "How well entropy tells images of pure noise, every pixel of its own, from test images. They look "
        "easy to notice, and yet a network can be sure about them.",
    ),
    Column(
        "fpr95_ood",
        "FPR95",
        _FOREIGN,
        False,
        _percent,
        "False alarms: the share of test inputs that are flagged too when the alarm is set to catch "
        "95 % of the unfamiliar ones.",
    ),
    Column(
        "seconds_per_epoch",
        "Time / epoch",
        _COST,
        False,
        duration,
        "Training time divided by the epochs that were asked for, on the machine that made this page; an "
        "ensemble’s members count together.",
    ),
    Column(
        "seconds",
        "Time",
        _COST,
        False,
        duration,
        "Time spent in training, on the machine that made this page.",
        main=False,
    ),
    Column(
        "peak_memory",
        "Peak memory",
        _COST,
        False,
        memory,
        "How much memory training took at its peak on top of what was in use before. Below a few "
        "megabytes it is mostly noise.",
    ),
    Column(
        "stored",
        "Stored",
        _COST,
        False,
        amount,
        "Numbers that the posterior keeps: one for each weight for a single network, two for a mean and a "
        "variance, one for each weight and member for an ensemble.",
    ),
    Column(
        "parameters",
        "Parameters",
        _COST,
        None,
        whole,
        "Trainable numbers in the network itself; a posterior may store several for each.",
        main=False,
    ),
)


def columns_with_data(methods: Iterable[MethodResult], main: bool) -> tuple[Column, ...]:
    """The columns in which at least one method has a value.

    Args:
        methods: The rows.
        main: Only those for the table at the top.
    """
    rows = [method.scores for method in methods]
    return tuple(
        column
        for column in COLUMNS
        if (column.main or not main) and any(row.get(column.key) is not None for row in rows)
    )


def best_value(column: Column, rows: Iterable[Mapping[str, float | None]]) -> float | None:
    """The best value of a column; None if it has no better end or all are shown alike."""
    values = [value for row in rows if (value := row.get(column.key)) is not None]
    if column.higher is None or len({column.show(value) for value in values}) < 2:
        return None
    return max(values) if column.higher else min(values)


def is_best(column: Column, value: float | None, best: float | None) -> bool:
    """Whether a value is the best one or is shown with the same digits."""
    return value is not None and best is not None and column.show(value) == column.show(best)


def is_level(column: Column, method: MethodResult, methods: Iterable[MethodResult]) -> bool:
    """Whether seeds alone could explain a method's distance from the best one.

    True if both have a spread and the distance of their means is at most twice its standard error.
    """
    rows = list(methods)
    best = best_value(column, [row.scores for row in rows])
    value = method.scores.get(column.key)
    if best is None or value is None:
        return False
    champion = next(row for row in rows if row.scores.get(column.key) == best)
    errors = [_standard_error(column, method), _standard_error(column, champion)]
    if None in errors:
        return False
    return abs(value - best) <= 2 * math.hypot(*(error for error in errors if error is not None))


def _standard_error(column: Column, method: MethodResult) -> float | None:
    spread = method.spread.get(column.key)
    return None if spread is None or len(method.runs) < 2 else spread / math.sqrt(len(method.runs))
