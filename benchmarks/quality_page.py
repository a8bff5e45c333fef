"""docs/quality.md and its heat map, from the rows of benchmarks/quality.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from quality_tasks import TASKS

from torchbayes.train.registry import METHODS

ROOT = Path(__file__).parents[1]
CHOSEN_BY = 0  # the seed by whose test scores the methods' constants were chosen
SLACK = 0.02  # nats per example by which a method may be worse than map
Table = dict[tuple[str, str], dict[str, Any]]

_HEAD = """# Quality at the defaults

Every method with no option given, on {tasks} small tasks of many kinds, {seeds} each: what a newcomer
gets. `make quality` measures what has changed and writes this page and its picture; rows are in
results/quality.jsonl. NLL is in nats per test example (per pixel for segmentation; targets of regressions are
standardised). Every method gets the epochs that `map` gets. `ensemble` is five networks of that many epochs
and so costs five times as much; `ensemble/5` has a fifth of the epochs for each and costs what `map` costs.

The constants of the methods' rules were chosen on these tasks by the test scores of seed 0. Its rows are
therefore left out here: every seed draws other examples, or another split, and other initial weights.
A row stays until it is measured again, so some are older than the code; `make quality` measures those.

![NLL of every method less that of map](images/quality.png)

## In one line each

A method wins a task if its NLL, the mean over seeds, is below the other's. "Worst" is the largest NLL above
that of `map`; the aim is at most {slack}. A breakdown is an error in training, or an NLL that is not
finite; what a method refuses before its first update, with the sentence below, is not
offered.

| method | beats `map` | beats `ensemble/5` | beats or equals `ensemble` | worst against `map` | breakdowns |
| --- | ---: | ---: | ---: | ---: | ---: |
"""


def write_page(rows: list[dict[str, Any]], docs: Path = ROOT / "docs") -> None:
    """Write the page and the picture from the newest row of each task, method and seed."""
    newest = {
        (r["task"], r["method"], r["seed"]): r
        for r in rows if not r["quick"] and r["seed"] != CHOSEN_BY
    }  # fmt: skip
    table = _means(newest.values())
    tasks = [t for t in TASKS if (t, "map") in table]
    methods = [m for m in [*METHODS, "ensemble/5"] if any((t, m) in table for t in tasks)]
    seeds = max(entry["seeds"] for entry in table.values())
    text = [
        _HEAD.format(
            tasks=len(tasks),
            seeds="one seed" if seeds == 1 else f"up to {seeds} seeds",
            slack=SLACK,
        )
    ]
    text += [_line(m, tasks, table) for m in methods if m != "map"]
    text += [
        "\n## NLL less that of map\n\n",
        _row("task", ["map", *(m for m in methods if m != "map")]),
    ]
    text.append("| --- |" + " ---: |" * len(methods) + "\n")
    for task in tasks:
        base = table[task, "map"]["nll"]
        others = [_signed(table, task, m) for m in methods if m != "map"]
        text.append(_row(task, [_plain(base), *others]))
    for kind, columns in (
        ("regression", ("rmse", "coverage")),
        ("classification", ("accuracy", "ece")),
    ):
        names = [t for t in tasks if TASKS[t].kind == kind]
        if not names:
            continue
        said = (
            "RMSE / coverage of 90 % intervals"
            if kind == "regression"
            else "accuracy / ECE, per cent"
        )
        text += [
            f"\n## {said}\n\n",
            _row("method", names),
            "| --- |" + " ---: |" * len(names) + "\n",
        ]
        for m in methods:
            text.append(_row(m, [_pair(table.get((t, m)), columns) for t in names]))
    text.append(
        "\n## The tasks\n\n| task | what it is | epochs | batch |\n| --- | --- | ---: | ---: |\n"
    )
    for name in tasks:
        task = TASKS[name]
        own = "fit's own"
        text.append(f"| {name} | {task.about} | {task.epochs or own} | {task.batch or own} |\n")
    failed = [r for r in newest.values() if "error" in r]
    for title, some in (
        ("Not offered", [r for r in failed if r.get("refused")]),
        ("Breakdowns", [r for r in failed if not r.get("refused")]),
    ):
        if some:
            text.append(f"\n## {title}\n\n")
            text += [
                f"- {r['task']}, {r['method']}, seed {r['seed']}: {r['error']}\n" for r in some
            ]
    (docs / "images").mkdir(exist_ok=True)
    (docs / "quality.md").write_text("".join(text), encoding="utf-8")
    picture = docs / "images" / "quality.png"
    _picture(tasks, [m for m in methods if m != "map"], table, picture)
    print(f"wrote {docs / 'quality.md'} and {picture}")


def _means(rows: Any) -> Table:
    """The means over seeds, and how many broke down."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    table: Table = {}
    for key, some in groups.items():
        whole = [r for r in some if "error" not in r]
        names = {k for r in whole for k in r if isinstance(r[k], float) and k != "seconds"}
        table[key] = {
            "seeds": len(some), "refused": any(r.get("refused") for r in some),
            "broken": sum("error" in r and not r.get("refused") for r in some),
            "nll": None, "by_seed": {r["seed"]: r["nll"] for r in whole},
            **{k: statistics.mean(r[k] for r in whole) for k in names if all(k in r for r in whole)},
        }  # fmt: skip
    return table


def _gap(table: Table, task: str, method: str, other: str) -> float | None:
    """How much larger a method's NLL is than another's, on the seeds that both have: tasks differ by seed."""
    mine, its = (table.get((task, m), {}).get("by_seed", {}) for m in (method, other))
    both = sorted(set(mine) & set(its))
    return statistics.mean(mine[s] - its[s] for s in both) if both else None


def _line(method: str, tasks: list[str], table: Table) -> str:
    cells = []
    for other, slack in (("map", 0.0), ("ensemble/5", 0.0), ("ensemble", 0.0005)):
        gaps = [g for t in tasks if (g := _gap(table, t, method, other)) is not None]
        won = (
            sum(g < 0 or g <= slack for g in gaps)
            if other == "ensemble"
            else sum(g < 0 for g in gaps)
        )
        cells.append("" if other == method or not gaps else f"{won} of {len(gaps)}")
    gaps = [g for t in tasks if (g := _gap(table, t, method, "map")) is not None]
    broken = sum(table[t, method]["broken"] for t in tasks if (t, method) in table)
    return _row(method, [*cells, f"{max(gaps):+.3f}" if gaps else "", str(broken)])


def _row(first: str, cells: list[str]) -> str:
    return f"| {' | '.join([first, *cells])} |\n"


def _plain(value: float | None) -> str:
    return "broke down" if value is None else f"{value:.3f}".replace("-", "−")


def _signed(table: Table, task: str, method: str) -> str:
    if (task, method) not in table:
        return ""
    gap = _gap(table, task, method, "map")
    return _failed(table[task, method]) if gap is None else f"{gap:+.3f}".replace("-", "−")


def _failed(entry: dict[str, Any]) -> str:
    return "not offered" if entry["refused"] else "broke down"


def _pair(entry: dict[str, Any] | None, columns: tuple[str, str]) -> str:
    if entry is None:
        return ""
    if any(c not in entry for c in columns):
        return _failed(entry)
    first, second = (entry[c] for c in columns)
    if columns[0] == "rmse":
        return f"{first:.3f} / {100 * second:.0f}"
    return f"{100 * first:.1f} / {100 * second:.1f}"


def _picture(tasks: list[str], methods: list[str], table: Table, file: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    gaps = [[_gap(table, t, m, "map") for t in tasks] for m in methods]
    values = np.array([[np.nan if g is None else g for g in row] for row in gaps])
    # Signed roots: a hundredth and a half are both to be seen.
    shade = np.sign(values) * np.sqrt(np.abs(values).clip(max=0.5))
    colours = plt.get_cmap("RdBu_r").copy()
    colours.set_bad("#555555")
    figure, axes = plt.subplots(figsize=(0.72 * len(tasks) + 1.6, 0.33 * len(methods) + 1.3))
    axes.imshow(np.ma.masked_invalid(shade), cmap=colours, vmin=-0.71, vmax=0.71, aspect="auto")
    for i, row in enumerate(gaps):
        for j, gap in enumerate(row):
            known = (tasks[j], methods[i]) in table
            said = (
                (f"{gap:+.2f}" if abs(gap) < 10 else f"{gap:+.0e}")
                if gap is not None
                else ""
                if not known
                else "–"
                if table[tasks[j], methods[i]]["refused"]
                else "×"
            )
            dark = gap is None or abs(shade[i, j]) > 0.5
            axes.text(
                j, i, said.replace("-", "−"), ha="center", va="center", fontsize=7,
                color="white" if dark else "black",
            )  # fmt: skip
    axes.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.set_title("NLL less that of map: blue is better", fontsize=10, loc="left")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
