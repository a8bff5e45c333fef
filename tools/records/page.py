"""docs/results.md: one row per claim, and every record's table with the command that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from tools.records.claims import Claim, judge
from tools.records.pictures import Picture, pictures_of
from torchbayes.experiments.record import Record
from torchbayes.experiments.record_table import markdown_row, record_table

__all__ = ["results_page"]

_HEAD = """\
# Results

Every figure below comes from a record in `results/`, made by the command beside it. This page is generated
from the records and from `recipes/claims.toml` by `make records`; verdicts are computed from
the conditions in that file, not written by hand. Values are mean ± standard deviation over seeds. The
budgets are far below the papers' (minutes on two CPU cores), so what matters is the order of the methods
rather than the level.
"""


def results_page(claims: Sequence[Claim], records: Mapping[str, Record]) -> str:
    """Write the page as Markdown.

    Args:
        claims: The papers' claims.
        records: What was measured, by recipe.
    """
    lines = [_HEAD, "## The papers' claims\n"]
    for paper, group in groupby(claims, key=lambda claim: claim.paper):
        lines += [f"### {paper}\n", markdown_row("claim", "paper", "ours", "budget", "verdict")]
        lines.append("| --- | --- | --- | --- | --- |")
        for claim in group:
            found = judge(claim, records)
            verdict = f"**{found.verdict}**" + (f": {claim.because}" if claim.because else "")
            budgets = "; ".join(dict.fromkeys(_budget(record) for record in found.records))
            where = f"{claim.text} ({claim.where})"
            lines.append(
                markdown_row(where, claim.reported, found.ours or "–", budgets or "–", verdict)
            )
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


def _shown(picture: Picture) -> str:
    return f"![{picture.alt}](images/results/{picture.name})\n\n{picture.caption}\n"
