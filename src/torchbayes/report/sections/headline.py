"""The top of the page: the results in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from markupsafe import Markup

from torchbayes.metrics import accuracy
from torchbayes.report.columns import COLUMNS, best_value, is_level
from torchbayes.report.results import MethodResult, Results, Scored
from torchbayes.report.wording import (
    count,
    duration,
    fixed,
    listing,
    method_name,
    percent,
    seed_note,
    significant,
    times,
    whole,
)

__all__ = ["Headline", "headline", "paired_lead"]

_COLUMNS = {column.key: column for column in COLUMNS}
_NLL = _COLUMNS["nll"]


@dataclass(frozen=True)
class Headline:
    """The page's title and introduction.

    Attributes:
        title: Heading, with the methods' names in colour.
        sentences: Introduction below it.
        facts: Label, value and method of each key figure.
    """

    title: Markup
    sentences: tuple[Markup, ...]
    facts: tuple[tuple[str, str, Markup], ...]


def headline(results: Results) -> Headline:
    """Say which method is best at what, what is uncertain, and what it cost."""
    ranked = sorted(results.scored("nll"), key=lambda scored: scored.value)
    if not ranked:
        title = "No scores yet" if results.methods else "No method finished"
        return Headline(Markup("{} on {}").format(title, results.data), (), ())
    parts = (_nll, _accuracy, _confidence, _unfamiliar, _cost)
    sentences = tuple(sentence for part in parts for sentence in part(results, ranked))
    return Headline(_title(results, ranked), sentences, tuple(_facts(results)))


def _title(results: Results, ranked: list[Scored]) -> Markup:
    best, *others = (scored.method for scored in ranked)
    if not others:
        return Markup("{} on {}").format(method_name(best), results.data)
    level = [method for method in others if is_level(_NLL, method, results.methods)]
    if level:
        names = listing([method_name(method) for method in (best, *level)])
        return Markup("{} are level on {}").format(names, results.data)
    verb = "is narrowly ahead" if _caveat(best, others[0], results) else "predicts best"
    return Markup("{} {} on {}").format(method_name(best), verb, results.data)


def _nll(results: Results, ranked: list[Scored]) -> Iterator[Markup]:
    best = ranked[0]
    name, value = method_name(best.method), significant(best.value)
    if len(ranked) == 1:
        yield Markup("{} reaches an NLL of {}.").format(name, value)
        return
    second = ranked[1]
    yield Markup("Of the {}, {} has the best NLL: {}, against {} for {}{}.").format(
        count(len(ranked), "method"), name, value, significant(second.value), method_name(second.method),
        _caveat(best.method, second.method, results),
    )  # fmt: skip


def _caveat(best: MethodResult, second: MethodResult, results: Results) -> str:
    """Say whether the lead in NLL could be luck, judged over seeds if there are several, else examples."""
    if best.spread.get("nll") is not None and second.spread.get("nll") is not None:
        level = is_level(_NLL, second, results.methods)
        return ", a lead that other seeds could reverse" if level else ""
    lead = paired_lead(best, second)
    if lead is None or abs(lead[0]) > 2 * lead[1]:
        return ""
    return ", a lead that could be luck on a test set of this size"


def paired_lead(better: MethodResult, worse: MethodResult) -> tuple[float, float] | None:
    """Return the mean difference in NLL over test examples and its standard error."""
    one, two = better.predictions, worse.predictions
    if one is None or two is None or not torch.equal(one.targets, two.targets):
        return None
    if len(one.targets) < 2:
        return None
    tiny = torch.finfo(torch.float32).tiny
    index = one.targets.long().unsqueeze(1)
    logs = [p.probs.double().gather(1, index).clamp_min(tiny).log() for p in (one, two)]
    difference = (logs[0] - logs[1]).squeeze(1)
    return float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))


def _accuracy(results: Results, ranked: list[Scored]) -> Iterator[Markup]:
    right = results.scored("accuracy")
    if not right:
        return
    top = max(right, key=lambda scored: scored.value)
    examples = {len(predictions.targets) for _, predictions in results.predicted}
    of = f" of {whole(examples.pop())} test examples" if len(examples) == 1 else ""
    if len(right) == 1:
        yield Markup("It is right on {}{}.").format(percent(top.value), of)
    else:
        name = method_name(top.method)
        yield Markup("{} is right most often, on {}{}.").format(name, percent(top.value), of)


def _confidence(results: Results, ranked: list[Scored]) -> Iterator[Markup]:
    gaps = [
        (float(p.test.confidence.double().mean()), accuracy(p.probs, p.targets), len(p.targets), m)
        for m, p in results.predicted
    ]
    if not gaps:
        return
    sure, right, examples, method = max(gaps, key=lambda gap: abs(gap[0] - gap[1]))
    noise = 2 * math.sqrt(max(right * (1 - right), 1 / examples) / examples)
    name = method_name(method)
    numbers = Markup("{} sure on average and right {} of the time{}.").format(
        percent(sure), percent(right), seed_note(method)
    )
    if abs(sure - right) > noise:
        word = "over-confident" if sure > right else "under-confident"
        yield Markup("{} is {}: it is {}").format(name, word, numbers)
    elif len(gaps) == 1:
        yield Markup("It is about as sure as it is right: {}").format(numbers)
    else:
        text = Markup("All are about as sure as they are right; the furthest off is {}, {}")
        yield text.format(name, numbers)


def _unfamiliar(results: Results, ranked: list[Scored]) -> Iterator[Markup]:
    found = results.scored("auroc_ood")
    if not found or results.ood is None:
        return
    best = max(found, key=lambda scored: scored.value)
    who, area = method_name(best.method), fixed(best.value, 3)
    if best.value <= 0.5:
        text = "Unfamiliar inputs ({1}) go unnoticed: the best AUROC is {2}, no better than a coin toss."
    elif len(found) == 1:
        text = "It separates unfamiliar inputs ({1}) from test inputs with an AUROC of {2}."
    else:
        text = "{0} is best at noticing unfamiliar inputs ({1}): AUROC {2}."
    yield Markup(text).format(who, results.ood, area)


def _cost(results: Results, ranked: list[Scored]) -> Iterator[Markup]:
    timed = {scored.method.name: scored for scored in results.scored("seconds") if scored.value > 0}
    if len(timed) < 2:
        return
    quick = min(timed.values(), key=lambda scored: scored.value)
    sentence = Markup("{} is cheapest at {}").format(
        method_name(quick.method), duration(quick.value)
    )
    best = timed.get(ranked[0].method.name, quick)
    if best is not quick and best.value > 1.05 * quick.value:
        factor = times(best.value / quick.value).rstrip("×")
        sentence += Markup("; {} takes {} times as long").format(method_name(best.method), factor)
    yield sentence + Markup(".")


def _facts(results: Results) -> Iterator[tuple[str, str, Markup]]:
    labels = {
        "nll": "Best NLL",
        "accuracy": "Most accurate",
        "ece": "Best calibrated, ECE",
        "auroc_ood": "Best on unfamiliar inputs, AUROC",
    }
    for key, label in labels.items():
        show, best = _COLUMNS[key].show, best_value(_COLUMNS[key], results.methods)
        if best is not None and not (key == "auroc_ood" and best <= 0.5):
            found = results.scored(key)
            names = [method_name(m) for value, m in found if show(value) == show(best)]
            who = listing(names) if len(names) < 4 else Markup(count(len(names), "method"))
            yield label, percent(best) if key == "accuracy" else show(best), who
