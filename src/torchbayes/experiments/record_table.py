"""The scores of a record as Markdown tables: what `recipes run` prints and a results page shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torchbayes.experiments.record import Figure, Record

__all__ = ["SCORE_STYLES", "markdown_row", "record_table"]

_SCORES = {
    # score: (title, format)
    "accuracy": ("accuracy", ".2%"),
    "nll": ("NLL", ".4f"),
    "ece": ("ECE", ".4f"),
    "auroc_misclassification": ("AUROC errors", ".3f"),
    "auroc_ood": ("AUROC OOD", ".3f"),
    "auroc_noise": ("AUROC noise", ".3f"),
    "rmse": ("RMSE", ".4f"),
    "forgotten": ("forgotten", ".2%"),
    "seconds": ("training s", ".0f"),
}
_PRUNED = {f"pruned_{share}_error": (f"{share} % removed", ".2%") for share in (0, 50, 75, 95, 98)}
_AVERAGED = {"error": ("error", ".2%"), "nll": ("NLL", ".4f"), "ece": ("ECE", ".4f")}
_TOGETHER = {
    "quadruple_faults": ("wrong in all of four", ".0f"),
    "correlation_within": ("|r| within blocks", ".3f"),
    "correlation_between": ("|r| between blocks", ".3f"),
    "correlation_floor": ("|r| by chance", ".3f"),
}
_TIMES = {
    f"x{times}_{score}": (f"{title} ×{times}", style)
    for times in (1, 2, 4, 8, 16)
    for score, (title, style) in _AVERAGED.items()
}
SCORE_STYLES = {"error": ("error", ".2%"), **_SCORES, **_PRUNED, **_TIMES, **_TOGETHER}
"""Title and format of every score of a record."""


def record_table(record: Record) -> str:
    """Format the scores of a record as Markdown tables."""
    rows = record.rows
    parts = [
        _table(rows, _SCORES),
        _table(rows, _PRUNED, "Error with the weights of the least |μ|/σ removed:"),
        _table(_by_times(rows), _AVERAGED, "Draws of the weights averaged, and their number:"),
        _table(
            rows, _TOGETHER, "Test images that four draws all get wrong; correlations of weights:"
        ),
    ]
    return "\n".join(part for part in parts if part)


def _table(
    rows: Mapping[str, Mapping[str, Figure]], styles: Mapping[str, tuple[str, str]], title: str = ""
) -> str:
    """Tabulate the scores in `styles` that exist, under a title; return nothing if none does."""
    present = {score for scores in rows.values() for score in scores}
    columns = {name: style for name, style in styles.items() if name in present}
    if not columns:
        return ""
    lines = [
        *([title, ""] if title else []),
        markdown_row("method", *(name for name, _ in columns.values())),
        "| --- |" + " ---: |" * len(columns),
    ]
    for row, scores in rows.items():
        if any(name in scores for name in columns):
            cells = (_cell(scores.get(name), style) for name, (_, style) in columns.items())
            lines.append(markdown_row(row, *cells))
    return "\n".join(lines) + "\n"


def _by_times(rows: Mapping[str, Mapping[str, Figure]]) -> dict[str, dict[str, Figure]]:
    """Make a row for every number of draws averaged: `x4_error` of a row is `error` of its row ×4."""
    found: dict[str, dict[str, Figure]] = {}
    for row, scores in rows.items():
        named = ((re.fullmatch(r"x(\d+)_(\w+)", score), score) for score in scores)
        times = sorted((int(match[1]), match[2], score) for match, score in named if match)
        for number, name, score in times:
            found.setdefault(f"{row} ×{number}", {})[name] = scores[score]
    return found


def _cell(figure: Figure | None, style: str) -> str:
    if figure is None:
        return "–"
    text = format(figure.mean, style)
    return text if figure.spread is None else f"{text} ± {format(figure.spread, style)}"


def markdown_row(*cells: Any) -> str:
    """Format one row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
