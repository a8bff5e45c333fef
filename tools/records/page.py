"""docs/results.md, the count of verdicts, and docs/results/, a page per paper with its claims and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.records.claims import STEPS, Judgement
from tools.records.pictures import Picture, pictures_of
from tools.records.readme import HEADLINE, verdict_table
from torchbayes.core.reading import read_toml
from torchbayes.experiments.record import Record
from torchbayes.experiments.record_table import SCORE_STYLES, markdown_row, record_table

__all__ = ["Reported", "read_reported", "results_pages", "slug"]

Reported = Mapping[str, Mapping[str, Mapping[str, float]]]
"""The papers' figures: by recipe, row and score."""

_HEAD = """\
# Results

Every figure on these pages comes from a record in `results/`, made by the command beside it. `make records`
writes them from the records and from `recipes/claims.toml`; verdicts are computed from the conditions in
that file, not written by hand. Values are mean ± standard deviation over seeds. The budgets are far
below the papers' (minutes on two CPU cores), so what matters is the order of the methods rather than
the level.

## The papers' claims, counted
"""

_TITLES = {"demo": "Every method side by side", "uci": "Tables (UCI)"}
_SLUGS = {"Hypernetwork posteriors": "hypernetwork"}

_DRAWN = {
    "vogn": """\
## Two classes in the plane

Decision boundary of the mean and of draws, beside Adam's. No verdict depends on it: one small run.
`python examples/vogn_2d.py`

![Boundaries of Adam and VOGN on two moons](../images/vogn_2d.png)
""",
    "bayes-by-backprop": """\
## Figures 2 and 3

Histograms of the weights of SGD, dropout and Bayes by Backprop; density and distribution function of the
signal-to-noise ratio. No verdict depends on them: one small run. `python examples/weights.py`

![Histograms of weights](../images/weights.png)

![Signal-to-noise ratio of the weights](../images/signal-to-noise.png)
""",
    "hwa": """\
## The loss landscape

On the plane of the trajectory's first two principal components. No verdict depends on it: one small run.
`python examples/landscape.py`

![Loss landscape with the path of training and its average](../images/landscape.png)
""",
}
"""Figures of the papers that examples draw."""


def slug(paper: str) -> str:
    """Return the folder of a paper's recipes, which is the name of its page."""
    return _SLUGS.get(paper, paper.lower().replace(" ", "-"))


def read_reported(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Read the papers' figures, the tables [reported.ROW], from all recipes below a folder."""
    tables = {
        file.relative_to(folder).with_suffix("").as_posix(): read_toml(file).get("reported", {})
        for file in sorted(folder.glob("*/*.toml"))
    }
    return {
        recipe: {
            row: {score: float(value) for score, value in scores.items()}
            for row, scores in rows.items()
        }
        for recipe, rows in tables.items()
    }


def results_pages(
    judged: Sequence[Judgement],
    records: Mapping[str, Record],
    reported: Reported,
    changes: Mapping[str, str],
) -> dict[str, str]:
    """Write the pages as Markdown, by their path below docs/.

    Args:
        judged: The verdicts on the papers' claims, paper by paper.
        records: What was measured, by recipe.
        reported: The papers' figures by recipe. Recipes that are only here were not run.
        changes: By recipe, how it differs now from what its record was measured with.
    """
    titles = {slug(one.claim.paper): one.claim.paper for one in judged}
    for recipe in records:
        folder = recipe.partition("/")[0]
        titles.setdefault(folder, _TITLES.get(folder, folder))
    pictures = pictures_of(records)
    pages = {"results.md": _first_page(judged, titles, pictures)}
    for page, title in titles.items():
        claims = [one for one in judged if slug(one.claim.paper) == page]
        own = {name: one for name, one in records.items() if name.startswith(f"{page}/")}
        lines = [f"# {title}\n", "[All results](../results.md)\n"]
        lines += ["## Its claims\n", *_claims(claims)] if claims else []
        for name, record in sorted(own.items()):
            lines += _section(record, reported.get(name, {}), changes.get(name))
            lines += [_shown(picture, "../") for picture in pictures.get(name, ())]
        lines += _not_run(page, records, reported)
        lines += [_DRAWN[page]] if page in _DRAWN else []
        pages[f"results/{page}.md"] = "\n".join(lines).rstrip() + "\n"
    return pages


def _first_page(
    judged: Sequence[Judgement],
    titles: Mapping[str, str],
    pictures: Mapping[str, Sequence[Picture]],
) -> str:
    links = {title: f"results/{page}.md" for page, title in titles.items()}
    lines = [_HEAD, verdict_table(judged, links)]
    if headline := pictures.get(HEADLINE):
        lines += [
            "## Every method, side by side\n",
            *(_shown(picture, "") for picture in headline),
            f"Made by `torchbayes recipes run {HEADLINE}`; [the table](results/demo.md).\n",
        ]
    lines += [
        "## The records\n",
        *(f"- [{title}]({link})" for title, link in links.items()),
        "- [Quality at the defaults](quality.md): every method with no option given, on 15 small tasks",
        "- [Benchmarks](benchmarks.md): what a step, a prediction and memory cost, beside other packages",
    ]
    return "\n".join(lines).rstrip() + "\n"


def _claims(judged: Sequence[Judgement]) -> list[str]:
    """Tabulate claims: the verdict first, the conditions of our figures below them."""
    lines = [markdown_row("verdict", "claim", "paper", "ours"), "| --- | --- | --- | --- |"]
    for found in judged:
        claim = found.claim
        budgets = "; ".join(dict.fromkeys(_budget(record) for record in found.records))
        if any(path.startswith(f"{STEPS}#") for path in claim.figures.values()):
            budgets = "`make bench`"
        about = ". ".join(part for part in (budgets, claim.because) if part)
        ours = "<br>".join(part for part in (found.ours, f"*{about}*" if about else "") if part)
        where = f"{claim.text} ({claim.where})"
        lines.append(markdown_row(f"**{found.verdict}**", where, claim.reported, ours or "–"))
    return [*lines, ""]


def _budget(record: Record) -> str:
    count = len(record.seeds)
    shared = record.settings.get("epochs")
    asked = (own.get("epochs", shared) for own in record.own.values())
    found = sorted({int(number) for number in asked if number is not None})
    epochs = " to ".join(str(number) for number in dict.fromkeys([*found[:1], *found[-1:]]))
    parts = [f"{epochs} epochs" if epochs else "", f"{count} seed{'s' if count > 1 else ''}"]
    minutes = f"{record.seconds / 60:.0f} min"
    return ", ".join(part for part in [*parts, minutes] if part)


def _section(
    record: Record, reported: Mapping[str, Mapping[str, float]], changed: str | None
) -> list[str]:
    machine = f"{record.machine['cores']} cores, {record.machine['processor']}"
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return [
        f"## {record.title}\n",
        f"`{record.command}`\n",
        f"{_trained(record)}; settings and notes: `recipes/{record.recipe}.toml`\n",
        *([] if changed is None else [f"{changed}\n"]),
        f"{_budget(record)}; {machine}; {versions}; commit {record.commit or 'unknown'}; "
        f"{record.finished[:10]}; `results/{record.recipe}.json`\n",
        *_beside(record, reported),
        record_table(record),
    ]


def _beside(record: Record, reported: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Tabulate the paper's figures beside ours, for the rows and scores that both have."""
    rows = {row: scores for row, scores in reported.items() if row in record.rows}
    named = dict.fromkeys(score for scores in rows.values() for score in scores)
    shared = [s for s in named if any(s in record.rows[row] for row in rows) and s in SCORE_STYLES]
    if not shared:
        return []
    titles = [
        f"{SCORE_STYLES[score][0]}, {whose}" for score in shared for whose in ("ours", "paper")
    ]
    lines = ["Beside the paper's figures:\n", markdown_row("method", *titles)]
    lines.append("| --- |" + " ---: |" * len(titles))
    for row, scores in rows.items():
        cells = []
        for score in shared:
            figure, style = record.rows[row].get(score), SCORE_STYLES[score][1]
            cells.append("–" if figure is None else format(figure.mean, style))
            cells.append("–" if score not in scores else f"*{scores[score]:{style}}*")
        lines.append(markdown_row(row, *cells))
    return ["\n".join(lines) + "\n"]


def _not_run(page: str, records: Mapping[str, Record], reported: Reported) -> list[str]:
    missing = [name for name in reported if name.startswith(f"{page}/") and name not in records]
    if not missing:
        return []
    names = ", ".join(f"`{name}`" for name in missing)
    return [f"## Not run\n\nRecipes without a record: {names}.\n"]


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
    parts: list[Any] = [
        f"{' and '.join(dict.fromkeys(networks))} on {shared.get('data', '')}",
        f"{number:,} training examples" if number else "all training examples",
        f"{held:.0%} of them held out" if held else "",
        f"batches of {shared.get('batch_size')}",
        "augmented" if shared.get("augment") else "",
    ]
    size = "Trained in the CPU-sized version" if record.size == "cpu" else "Trained"
    return f"{size}: " + ", ".join(part for part in parts if part)


def _shown(picture: Picture, up: str) -> str:
    return f"![{picture.alt}]({up}images/results/{picture.name})\n\n{picture.caption}\n"
