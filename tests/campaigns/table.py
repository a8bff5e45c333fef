"""The campaign's record and its tables on docs/reliability.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchbayes.core.reading import read_json
from torchbayes.core.storage import write_json, write_text

__all__ = ["bad", "read", "save", "text", "write_page"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- make campaign writes from here -->", "<!-- to here -->"

# What may come of an attempt, and the heading of its column.
_GOOD = {
    "kills": {"equal": "bit-equal"},
    "damaged files": {"clean": "one sentence", "unchanged": "unchanged", "read": "read"},
    "failing writes": {"one sentence": "one sentence, resumed equal", "not needed": "not needed"},
    "failing processes": {"as it should": "as it should be"},
    "memory": {"steady": "steady"},
    "threads": {"all answers right": "all answers right"},
}
_TITLES = {
    "kills": ("Kills", "killed", "kills"),
    "damaged files": ("Damaged files", "file", "damaged"),
    "failing writes": ("Writes that fail", "error", "injected"),
    "failing processes": ("One of two processes fails", "fault", "tried"),
    "memory": ("Memory, tensors and hooks: 2,000 steps, 500 predictions", "subject", "measured"),
    "threads": (
        "Eight threads predict with one network (40 answers each time)",
        "posterior",
        "tried",
    ),
}


def read(record: Path) -> list[dict[str, Any]]:
    """Return the runs of the record."""
    return list(read_json(record, "restore it")["runs"]) if record.exists() else []


def save(record: Path, runs: list[dict[str, Any]]) -> None:
    """Write the record."""
    write_json(record, {"runs": runs})


def _sums(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    result: dict[str, dict[str, dict[str, int]]] = {}
    for run in runs:
        for part, rows in run["tables"].items():
            for row, counts in rows.items():
                into = result.setdefault(part, {}).setdefault(row, {})
                for verdict, count in counts.items():
                    into[verdict] = into.get(verdict, 0) + count
    return result


def _cells(part: str, counts: dict[str, int]) -> list[int]:
    good = [counts.get(verdict, 0) for verdict in _GOOD[part]]
    total = sum(counts.values())
    return [total, *good, total - sum(good)]


def bad(runs: list[dict[str, Any]]) -> list[str]:
    """Return everything that should not have happened."""
    return [
        f"{part}: {row}: {verdict} ({count} times)"
        for part, rows in _sums(runs).items()
        for row, counts in rows.items()
        for verdict, count in counts.items()
        if verdict not in _GOOD[part]
    ]


def text(runs: list[dict[str, Any]]) -> str:
    """Return the tables in Markdown."""
    sums, lines = _sums(runs), []
    head = ["| run | commit | seed | minutes | kills | bit-equal | damaged files | bad |"]
    head.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for run in [*runs, *([{"tables": sums}] if len(runs) > 1 else [])]:
        tables = run["tables"]
        kills = [_cells("kills", c) for c in tables.get("kills", {}).values()]
        files = sum(sum(c.values()) for c in tables.get("damaged files", {}).values())
        wrong = sum(_cells(p, c)[-1] for p, rows in tables.items() for c in rows.values())
        first = run.get("began", "**all**")
        head.append(
            f"| {first} | {run.get('commit', '')} | {run.get('seed', '')} | "
            f"{run.get('minutes', '') if 'began' in run else round(sum(r['minutes'] for r in runs), 1)} | "
            f"{sum(k[0] for k in kills):,} | {sum(k[1] for k in kills):,} | {files:,} | {wrong:,} |"
        )
    lines += head
    for part, (title, row, count) in _TITLES.items():
        if part not in sums:
            continue
        columns = [row, count, *_GOOD[part].values(), "bad"]
        lines += ["", f"### {title}", "", "| " + " | ".join(columns) + " |"]
        lines.append("| --- |" + " ---: |" * (len(columns) - 1))
        rows = sorted(sums[part].items())
        cells = [(name, _cells(part, counts)) for name, counts in rows]
        if len(cells) > 1:
            cells.append(("**all**", [sum(c) for c in zip(*(c for _, c in cells), strict=True)]))
        lines += [f"| {name} | " + " | ".join(f"{n:,}" for n in own) + " |" for name, own in cells]
    found = bad(runs)
    if found:
        lines += ["", "### Bad", "", *(f"- {line[:300]}" for line in found[:40])]
    return "\n".join(lines)


def write_page(runs: list[dict[str, Any]]) -> None:
    """Put the tables on the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(PAGE, f"{before}{BEGIN}\n\n{text(runs)}\n\n{END}{after}")
