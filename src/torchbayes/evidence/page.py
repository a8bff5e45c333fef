"""docs/results.md: one row for every claim, and every record's table with the command that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torchbayes.evidence.claims import Claim, judge
from torchbayes.evidence.record import Figure, Record

__all__ = ["record_table", "results_page"]

_HEAD = """\
# Results

Every figure below comes from a record in `results/`, made by the command beside it. This page is generated
from the records and from `recipes/claims.toml` by `torchbayes recipes results`; verdicts are computed from
the conditions in that file, not written by hand. Values are mean ± standard deviation over seeds. The
budgets are far below the papers' (minutes on two CPU cores), so what matters is the order of the methods
rather than the level.
"""
_SCORES = {
    # score: (title, format)
    "accuracy": ("accuracy", ".2%"),
    "nll": ("NLL", ".4f"),
    "ece": ("ECE", ".4f"),
    "auroc_misclassification": ("AUROC errors", ".3f"),
    "auroc_ood": ("AUROC OOD", ".3f"),
    "auroc_noise": ("AUROC noise", ".3f"),
    "rmse": ("RMSE", ".4f"),
    "seconds": ("training s", ".0f"),
}
_EXTRA = ("pruned_", "x1_", "x4_", "x16_", "quadruple_", "correlation_", "forgotten")


def results_page(claims: Sequence[Claim], records: Mapping[str, Record]) -> str:
    """The page as Markdown.

    Args:
        claims: The papers' claims.
        records: What was measured, by recipe.
    """
    lines = [_HEAD, "## The papers' claims\n"]
    for paper, group in groupby(claims, key=lambda claim: claim.paper):
        lines += [f"### {paper}\n", _row("claim", "paper", "ours", "budget", "verdict")]
        lines.append("| --- | --- | --- | --- | --- |")
        for claim in group:
            found = judge(claim, records)
            verdict = f"**{found.verdict}**" + (f": {claim.because}" if claim.because else "")
            budgets = "; ".join(dict.fromkeys(_budget(record) for record in found.records))
            where = f"{claim.text} ({claim.where})"
            lines.append(_row(where, claim.reported, found.ours or "–", budgets or "–", verdict))
        lines.append("")
    lines.append("## The records\n")
    for name in sorted(records):
        lines += _section(records[name])
    return "\n".join(lines).rstrip() + "\n"


def _budget(record: Record) -> str:
    count = len(record.seeds)
    shared = record.settings.get("epochs")
    asked = (own.get("epochs", shared) for own in record.own.values())
    found = sorted({int(number) for number in asked if number is not None})
    epochs = " to ".join(str(number) for number in dict.fromkeys([*found[:1], *found[-1:]]))
    parts = [f"{epochs} epochs" if epochs else "", f"{count} seed{'s' if count > 1 else ''}"]
    minutes = f"{record.seconds / 60:.0f} min"
    return ", ".join(part for part in [*parts, minutes] if part)


def _section(record: Record) -> list[str]:
    machine = f"{record.machine['cores']} cores, {record.machine['processor']}"
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return [
        f"### {record.title}\n",
        f"`{record.command}`\n",
        f"{_budget(record)}; {machine}; {versions}; commit {record.commit or 'unknown'}; "
        f"{record.finished[:10]}; `results/{record.recipe}.json`\n",
        record_table(record),
    ]


def record_table(record: Record) -> str:
    """The scores of a record as a Markdown table."""
    present = {score for scores in record.rows.values() for score in scores}
    known = {name: style for name, style in _SCORES.items() if name in present}
    extra = sorted(n for n in present if n.startswith(_EXTRA))
    columns = known | {name: (name.replace("_", " "), ".4f") for name in extra}
    lines = [
        _row("method", *(title for title, _ in columns.values())),
        "| --- |" + " ---: |" * len(columns),
    ]
    for row, scores in record.rows.items():
        cells = (_cell(scores.get(name), style) for name, (_, style) in columns.items())
        lines.append(_row(row, *cells))
    return "\n".join(lines) + "\n"


def _cell(figure: Figure | None, style: str) -> str:
    if figure is None:
        return "–"
    text = format(figure.mean, style)
    return text if figure.spread is None else f"{text} ± {format(figure.spread, style)}"


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
