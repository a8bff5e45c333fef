"""docs/results.md: one row for every claim, and every record's table with the command that made it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torchbayes.evidence.claims import Claim, judge
from torchbayes.evidence.pictures import ResultPicture, pictures_of
from torchbayes.experiments.record import Figure, Record

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
    pictures = pictures_of(records)
    for name in sorted(records):
        lines += _section(records[name])
        lines += [_shown(picture) for picture in pictures.get(name, ())]
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
        f"{_trained(record)}; settings and notes: `recipes/{record.recipe}.toml`\n",
        f"{_budget(record)}; {machine}; {versions}; commit {record.commit or 'unknown'}; "
        f"{record.finished[:10]}; `results/{record.recipe}.json`\n",
        record_table(record),
    ]


def _trained(record: Record) -> str:
    """Which networks were trained on what: a CPU-sized version can be far from the title's."""
    shared = record.settings
    networks = []
    for own in record.own.values():
        options = own.get("model_options", shared.get("model_options", {}))
        named = ", ".join(f"{name} {value}" for name, value in options.items())
        network = own.get("model", shared.get("model", ""))
        networks.append(f"{network} ({named})" if named else network)
    number, held = shared.get("examples"), shared.get("validation")
    parts = [
        f"{' and '.join(dict.fromkeys(networks))} on {shared.get('data', '')}",
        f"{number:,} training examples" if number else "all training examples",
        f"{held:.0%} of them held out" if held else "",
        f"batches of {shared.get('batch_size')}",
        "augmented" if shared.get("augment") else "",
    ]
    size = "Trained in the CPU-sized version" if record.size == "cpu" else "Trained"
    return f"{size}: " + ", ".join(part for part in parts if part)


def _shown(picture: ResultPicture) -> str:
    return f"![{picture.alt}](images/results/{picture.name})\n\n{picture.caption}\n"


def record_table(record: Record) -> str:
    """The scores of a record as Markdown tables."""
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
    """The scores in `styles` that there are, with a title above; empty if there are none."""
    present = {score for scores in rows.values() for score in scores}
    columns = {name: style for name, style in styles.items() if name in present}
    if not columns:
        return ""
    lines = [
        *([title, ""] if title else []),
        _row("method", *(name for name, _ in columns.values())),
        "| --- |" + " ---: |" * len(columns),
    ]
    for row, scores in rows.items():
        if any(name in scores for name in columns):
            cells = (_cell(scores.get(name), style) for name, (_, style) in columns.items())
            lines.append(_row(row, *cells))
    return "\n".join(lines) + "\n"


def _by_times(rows: Mapping[str, Mapping[str, Figure]]) -> dict[str, dict[str, Figure]]:
    """A row for every number of draws averaged: `x4_error` of a row is `error` of its row ×4."""
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


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
