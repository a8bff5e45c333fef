"""The papers' claims, and what our figures say of each.

A claim names the figures that it is judged by and the conditions under which it counts as reproduced or
partly reproduced; nobody writes a verdict by hand. An entry of claims.toml:

    [[claim]]
    paper = "Bayes by Backprop"
    where = "Table 3"
    text = "75 % of the weights can be removed without harm"
    reported = "1.24 % → 1.24 %"
    figures = { whole = "bayes-by-backprop/mnist-mixture-1200#bbb/error", pruned = "…#bbb/pruned_75_error" }
    shown = "{whole:.2%} → {pruned:.2%}"
    reproduced = "pruned - whole <= 0.001"
    partly = "pruned - whole <= 0.005"

In a condition, `NAME_spread` is the standard deviation over seeds, 0 where there was one seed. Comparisons in
parentheses may be added up: `(a < b) + (c < d) >= 1`. A claim about time is judged by the benchmark of steps,
which measures in turns, and not by the seconds of runs that shared a machine: `benchmarks#resnet20/atmc` is
the median of its step's time relative to that of the plain optimiser beside it, and
`benchmarks#resnetpp56/batch norm` that of a network with batch norm relative to the ResNet++.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchbayes.core.reading import read_toml
from torchbayes.experiments.record import Figure, Record

__all__ = ["STEPS", "Claim", "Judgement", "judge", "read_claims"]

STEPS = "benchmarks"
"""What stands before `#` in the figure of a step's time."""


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        paper: The paper.
        where: The table, figure or section.
        text: The claim.
        reported: The paper's own figure.
        figures: Ours, by a name for the conditions: `recipe#row/score`, or `benchmarks#network/method`.
        shown: A format string for our figures.
        reproduced: The condition under which the claim counts as reproduced.
        partly: The condition under which it counts as partly reproduced; none if empty.
        because: Why it was not run, if it was not; otherwise a remark.
    """

    paper: str
    where: str
    text: str
    reported: str
    figures: dict[str, str] = field(default_factory=dict)
    shown: str = ""
    reproduced: str = ""
    partly: str = ""
    because: str = ""


@dataclass(frozen=True)
class Judgement:
    """Verdict of our figures on a claim.

    Attributes:
        claim: The claim.
        verdict: reproduced, partly reproduced, not reproduced or not run.
        ours: Our figures as text.
        records: The records that the figures are from.
    """

    claim: Claim
    verdict: str
    ours: str
    records: tuple[Record, ...]


def read_claims(file: Path) -> list[Claim]:
    """Read a claims.toml."""
    claims = []
    for number, table in enumerate(read_toml(file).get("claim", []), 1):
        try:
            claims.append(Claim(**table))
        except TypeError as error:
            raise ValueError(f"{file}: claim {number} is not as expected: {error}") from error
    return claims


def judge(
    claim: Claim, records: Mapping[str, Record], steps: Mapping[str, Any] | None = None
) -> Judgement:
    """Compare a claim with the records.

    Args:
        claim: The claim.
        records: What was measured, by recipe.
        steps: The benchmark of steps, by network, as far as there is one.

    Raises:
        ValueError: If a record lacks a row or score that the claim names, or a condition is no comparison.
    """
    found = {name: _figure(path, records, steps or {}) for name, path in claim.figures.items()}
    used = [path.partition("#")[0] for path in claim.figures.values()]
    present = tuple(records[name] for name in dict.fromkeys(used) if name in records)
    figures = {name: figure for name, figure in found.items() if figure is not None}
    if not figures or len(figures) < len(found):
        return Judgement(claim, "not run", "", present)
    values = {name: figure.mean for name, figure in figures.items()}
    spreads = {f"{name}_spread": figure.spread or 0.0 for name, figure in figures.items()}
    ours = claim.shown.format(**{name: _Shown(figure) for name, figure in figures.items()})
    if _holds(claim.reproduced, values | spreads):
        verdict = "reproduced"
    elif claim.partly and _holds(claim.partly, values | spreads):
        verdict = "partly reproduced"
    else:
        verdict = "not reproduced"
    return Judgement(claim, verdict, ours, present)


class _Shown:
    """Format a figure as mean ± spread, both with the same format."""

    def __init__(self, figure: Figure) -> None:
        self._figure = figure

    def __format__(self, spec: str) -> str:
        mean = format(self._figure.mean, spec)
        if self._figure.spread is None:
            return mean
        spread = format(self._figure.spread, spec)
        if spec.endswith("%"):
            return f"{mean[:-1]} ± {spread[:-1]} %"
        return f"{mean} ± {spread}"


def _figure(path: str, records: Mapping[str, Record], steps: Mapping[str, Any]) -> Figure | None:
    recipe, _, rest = path.partition("#")
    row, _, score = rest.rpartition("/")
    if recipe == STEPS:
        measured = steps.get(row, {}).get("steps", {}).get(score, {})
        return Figure.of([measured["ratio"]]) if "ratio" in measured else None
    record = records.get(recipe)
    if record is None:
        return None
    try:
        return record.rows[row][score]
    except KeyError:
        known = ", ".join(f"{r}/{s}" for r, scores in record.rows.items() for s in scores)
        raise ValueError(f"the record of {recipe} has no {row}/{score}: it has {known}") from None


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.USub: operator.neg,
}  # fmt: skip


def _holds(condition: str, values: Mapping[str, float]) -> bool:
    """Evaluate a condition: numbers, names, + - * /, comparisons, `and` and `or`, nothing else."""
    try:
        result = _value(ast.parse(condition, mode="eval").body, values)
    except (SyntaxError, KeyError) as error:
        raise ValueError(
            f"cannot judge by {condition!r} ({error}): expected a comparison of {', '.join(values)}"
        ) from error
    if not isinstance(result, bool):
        raise ValueError(f"cannot judge by {condition!r}: it is {result!r}, expected a comparison")
    return result


def _value(node: ast.AST, values: Mapping[str, float]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, values))
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.BoolOp):
        parts = [_value(part, values) for part in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.Compare):
        sides = [_value(side, values) for side in (node.left, *node.comparators)]
        pairs = zip(node.ops, sides, sides[1:], strict=False)
        return all(_OPERATORS[type(op)](left, right) for op, left, right in pairs)
    raise SyntaxError(f"{type(node).__name__} is not allowed")
