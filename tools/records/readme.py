"""The README's tables: the measured methods side by side, and how the papers' claims fared.

They stand between `<!-- NAME -->` and `<!-- /NAME -->`; what is there is replaced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from tools.records.claims import Judgement
from torchbayes.experiments.record import Record

__all__ = ["HEADLINE", "between", "filled_in", "verdict_table"]

HEADLINE = "demo/fashion-mnist"
_SCORES = {
    # score: (title, whether more is better, format)
    "accuracy": ("accuracy ↑", True, ".1%"),
    "nll": ("NLL ↓", False, ".3f"),
    "ece": ("ECE ↓", False, ".3f"),
    "auroc_misclassification": ("errors ↑", True, ".3f"),
    "auroc_ood": ("MNIST ↑", True, ".3f"),
    "auroc_noise": ("noise ↑", True, ".3f"),
}
_VERDICTS = ("reproduced", "partly reproduced", "not reproduced", "not run")


def filled_in(text: str, judged: Sequence[Judgement], records: Mapping[str, Record]) -> str:
    """Replace what stands between the markers of a text; one without markers stays as it is.

    Args:
        text: The README.
        judged: The verdicts on the papers' claims.
        records: What was measured, by recipe. The text between the headline's markers stays if its
            record is missing.
    """
    record = records.get(HEADLINE)
    if record is not None:
        text = between(text, "headline", f"{_about(record)}\n{_table(record)}")
    return between(text, "claims", verdict_table(judged))


def between(text: str, name: str, content: str) -> str:
    """Put `content` between the markers `<!-- NAME -->` and `<!-- /NAME -->` of a text."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{content}\n{found[2]}", text)


def _about(record: Record) -> str:
    settings, seeds = record.settings, len(record.seeds)
    runs = f"mean of {seeds} seeds" if seeds > 1 else "one seed, so small differences say nothing"
    return (
        f"LeNet-5 on {settings['examples']:,} images of Fashion-MNIST, {settings['epochs']} epochs, "
        f"{settings['samples']} draws, {runs}; the best NLL "
        "first, the best of\neach column in bold. *Errors*, *MNIST* and *noise*: the AUROC with which "
        "uncertainty separates wrong answers from right ones,\nMNIST's images from test images, and noise "
        "from test images; 0.5 is a coin toss. *Stored*: numbers kept per weight.\n"
        f"Made by `{record.command}`; more scores{' and spreads' if seeds > 1 else ''}: "
        "[docs/results/demo.md](docs/results/demo.md).\n"
    )


def _table(record: Record) -> str:
    """Tabulate the methods, the best NLL first."""
    lines = [
        "| method | " + " | ".join(title for title, _, _ in _SCORES.values()) + " | stored |",
        "| --- |" + " ---: |" * (len(_SCORES) + 1),
    ]
    shown = {
        method: {name: format(scores[name].mean, _SCORES[name][2]) for name in _SCORES}
        for method, scores in record.rows.items()
    }
    best = {
        name: (max if more else min)((row[name] for row in shown.values()), key=_number)
        for name, (_, more, _) in _SCORES.items()
    }
    for method, scores in sorted(record.rows.items(), key=lambda item: item[1]["nll"].mean):
        cells = [f"**{t}**" if t == best[name] else t for name, t in shown[method].items()]
        cells.append(f"{scores['stored'].mean / scores['parameters'].mean:.3g}")
        lines.append(f"| `{method}` | " + " | ".join(cells).replace("%", " %") + " |")
    return "\n".join(lines) + "\n"


def _number(shown: str) -> float:
    return float(shown.removesuffix("%"))


def verdict_table(judged: Sequence[Judgement], links: Mapping[str, str] | None = None) -> str:
    """Count each paper's claims by verdict.

    Args:
        judged: The verdicts.
        links: The page of each paper; none if it is not to be linked.
    """
    counts: dict[str, Counter[str]] = {}
    for one in judged:
        counts.setdefault(one.claim.paper, Counter())[one.verdict] += 1
    lines = ["| paper | " + " | ".join(_VERDICTS) + " |", "| --- |" + " ---: |" * len(_VERDICTS)]
    for paper, found in counts.items():
        name = f"[{paper}]({links[paper]})" if links else paper
        lines.append(f"| {name} | " + " | ".join(str(found[v]) for v in _VERDICTS) + " |")
    return "\n".join(lines) + "\n"
