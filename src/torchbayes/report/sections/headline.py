"""The top of the page: the results in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from markupsafe import Markup
from torch import Tensor

from torchbayes.metrics import accuracy
from torchbayes.report.columns import COLUMNS, best_value, is_level
from torchbayes.report.results import MethodResult, Results, Scored
from torchbayes.report.wording import (
    count,
    duration,
    fixed,
    method_list,
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
    """Say which posterior is best at what, what is uncertain, and what it cost."""
    ranked = sorted(results.scored("nll"), key=lambda scored: scored.value)
    if not ranked:
        title = "No scores yet" if results.methods else "No method finished"
        return Headline(Markup("{} on {}").format(title, results.data), (), ())
    parts = (_nll, _accuracy, _confidence, _unfamiliar, _cost)
    sentences = tuple(sentence for part in parts for sentence in part(results, ranked))
    return Headline(_title(results, ranked), sentences, tuple(_facts(results)))


def _contest(ranked: list[Scored]) -> list[Scored]:
    """Return the posteriors, which the headline is about, or all methods if there are none."""
    return [scored for scored in ranked if not scored.method.point] or ranked


def _title(results: Results, ranked: list[Scored]) -> Markup:
    best, *others = (scored.method for scored in _contest(ranked))
    if len(ranked) == 1:
        return Markup("{} on {}").format(method_name(best), results.data)
    beaten = best is not ranked[0].method  # by a point estimate
    level = [method for method in others if is_level(_NLL, method, [best, *others])]
    if level:
        names = method_list([best, *level])
        text = "{} lead the posteriors on {}" if beaten else "{} are level on {}"
        return Markup(text).format(names, results.data)
    narrow = bool(others) and bool(_caveat(best, others[0], [best, *others]))
    if beaten:
        verb = "is narrowly the best posterior" if narrow else "is the best posterior"
    else:
        verb = "is narrowly ahead" if narrow else "predicts best"
    return Markup("{} {} on {}").format(method_name(best), verb, results.data)


def _nll(results: Results, ranked: list[Scored]) -> Iterator[Markup]:
    first, contest = ranked[0], _contest(ranked)
    best = contest[0]
    name, value = method_name(best.method), significant(best.value)
    if len(ranked) == 1:
        kind = ", a point estimate," if first.method.point else ""
        yield Markup("{}{} reaches an NLL of {}.").format(name, kind, value)
        return
    many = count(len(ranked), "method")
    if best is not first:
        yield Markup(
            "Of the {}, {}, a point estimate, has the best NLL: {}; the best posterior is {} with {}"
        ).format(many, method_name(first.method), significant(first.value), name, value) + _against(
            contest, ", ahead of {1} for {0}"
        )
        return
    kind = "" if not first.method.point else ", a point estimate like all of them,"
    yield Markup("Of the {}, {}{} has the best NLL: {}").format(many, name, kind, value) + _against(
        ranked, ", against {1} for {0}"
    )


def _against(contest: list[Scored], text: str) -> Markup:
    """Say how far the second is behind the first, and end the sentence."""
    if len(contest) == 1:
        return Markup(".")
    best, second = contest[:2]
    methods = [scored.method for scored in contest]
    return Markup(text + "{2}.").format(
        method_name(second.method), significant(second.value),
        _caveat(best.method, second.method, methods),
    )  # fmt: skip


def _caveat(best: MethodResult, second: MethodResult, methods: list[MethodResult]) -> str:
    """Say whether the lead in NLL could be luck, judged over seeds if there are several, else examples."""
    if best.spread.get("nll") is not None and second.spread.get("nll") is not None:
        level = is_level(_NLL, second, methods)
        return ", a lead that other seeds could reverse" if level else ""
    lead = paired_lead(best, second)
    if lead is None or abs(lead[0]) > 2 * lead[1]:
        return ""
    return ", a lead that could be luck on a test set of this size"


def paired_lead(better: MethodResult, worse: MethodResult) -> tuple[float, float] | None:
    """Return the mean difference in NLL over test examples and its standard error."""
    one, two = _log_likelihoods(better), _log_likelihoods(worse)
    if one is None or two is None or len(one[0]) < 2 or not torch.equal(one[1], two[1]):
        return None
    difference = one[0] - two[0]
    return float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))


def _log_likelihoods(method: MethodResult) -> tuple[Tensor, Tensor] | None:
    """Return the log-likelihood of every test example, and the targets."""
    if (p := method.predictions) is not None:
        likely = p.probs.double().gather(1, p.targets.long().unsqueeze(1)).squeeze(1)
        return likely.clamp_min(torch.finfo(torch.float32).tiny).log(), p.targets
    if (v := method.values) is not None:
        each = torch.distributions.Normal(v.means.double(), v.stds.double()).log_prob(v.targets)
        mixture = each.flatten(2).sum(2) if each.dim() > 2 else each
        return mixture.logsumexp(0) - math.log(len(mixture)), v.targets
    return None


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
    best = timed.get(_contest(ranked)[0].method.name, quick)
    if best is not quick and best.value > 1.05 * quick.value:
        factor = times(best.value / quick.value).rstrip("×")
        sentence += Markup("; {} takes {} times as long").format(method_name(best.method), factor)
    yield sentence + Markup(".")


def _facts(results: Results) -> Iterator[tuple[str, str, Markup]]:
    unfamiliar = f" ({results.ood})" if results.ood else ""
    if len(results.methods) == 1:
        words = {
            "nll": "NLL", "accuracy": "Accuracy", "rmse": "RMSE", "ece": "Calibration error, ECE",
            "coverage90": "Values inside 90 % intervals",
            "auroc_ood": f"Unfamiliar inputs{unfamiliar}, AUROC",
        }  # fmt: skip
        for key, label in words.items():
            for value, _ in results.scored(key):
                share = key in ("accuracy", "coverage90")
                yield label, percent(value) if share else _COLUMNS[key].show(value), Markup("")
        return
    posteriors = results.posteriors
    labels = {
        "nll": "Best NLL of a posterior" if posteriors else "Best NLL",
        "accuracy": "Most accurate",
        "rmse": "Lowest RMSE",
        "ece": "Best calibrated, ECE",
        "auroc_ood": f"Best on unfamiliar inputs{unfamiliar}, AUROC",
    }
    for key, label in labels.items():
        methods = posteriors if key == "nll" and posteriors else results.methods
        show, best = _COLUMNS[key].show, best_value(_COLUMNS[key], methods)
        if best is not None and not (key == "auroc_ood" and best <= 0.5):
            found = [
                m for value, m in results.scored(key) if m in methods and show(value) == show(best)
            ]
            who = method_list(found) if len(found) < 4 else Markup(count(len(found), "method"))
            if key != "nll" and all(method.point for method in found):
                estimate = "a point estimate" if len(found) == 1 else "point estimates"
                who += Markup(", {}").format(estimate)
            yield label, percent(best) if key == "accuracy" else show(best), who
