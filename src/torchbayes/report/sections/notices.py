"""Warnings in plain language: each rule looks at the results and says what a reader should know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results, Scored
from torchbayes.report.wording import (
    count,
    fixed,
    listing,
    method_name,
    percent,
    significant,
    whole,
    wilson,
)

__all__ = ["RULES", "Notice", "Rule", "notices", "notices_section"]

_UNDERFITTING = 0.02
_CALIBRATION = 0.05
_OVERFITTING = 1.25
# A thousandth of a nat on average: draws that differ by less would not change a decision.
_NO_DISAGREEMENT = 1e-3
_KL_SHARE = 0.01
_RHAT = 1.1
_NAMED = 6


@dataclass(frozen=True)
class Notice:
    """Something a reader should know.

    Attributes:
        serious: Whether it casts doubt on a method, rather than on how to read the page.
        text: What it is and what to do.
    """

    serious: bool
    text: Markup


Rule = Callable[[Results], Iterator[Notice]]


def notices(results: Results) -> list[Notice]:
    """What the rules have to say, the serious things first."""
    found = [notice for rule in RULES for notice in rule(results)]
    return sorted(found, key=lambda notice: not notice.serious)


def notices_section(results: Results) -> Section | None:
    """The notices as a section."""
    found = notices(results)
    if not found:
        return None
    body = render("notices.html.j2", notices=found)
    return Section("notices", "Notes", "Worth knowing", body)


def unreadable(results: Results) -> Iterator[Notice]:
    """Files that could not be read."""
    for problem in results.problems:
        yield Notice(True, Markup("{}").format(problem))


def underfitting(results: Results) -> Iterator[Notice]:
    """Less accurate than plain training of the same network."""
    baseline = results.find("map")
    base = None if baseline is None else baseline.scores.get("accuracy")
    if baseline is None or base is None:
        return
    behind = [
        _with(method, f"by {fixed(100 * (base - value), 1)} points")
        for value, method in sorted(results.scored("accuracy"), key=_value)
        if base - value > _UNDERFITTING
    ]
    if behind:
        yield Notice(
            True,
            Markup(
                "{} {} less accurate than {}: underfitting. Train longer, or lower the noise or the "
                "prior’s weight."
            ).format(_most(behind), _are(behind), method_name(baseline)),
        )


def miscalibrated(results: Results) -> Iterator[Notice]:
    """Confidence far from accuracy."""
    kinds: dict[str, list[Markup]] = {}
    for value, method in sorted(results.scored("ece"), key=_value, reverse=True):
        if value <= _CALIBRATION:
            continue
        word = "badly calibrated"
        if method.predictions is not None:
            test = method.predictions.test
            right = (test.prediction == method.predictions.targets).double().mean()
            over = float(test.confidence.double().mean() - right)
            word = "over-confident" if over > 0 else "under-confident"
        kinds.setdefault(word, []).append(_with(method, f"ECE {fixed(value, 3)}"))
    for word, names in kinds.items():
        yield Notice(
            True,
            Markup(
                "{} {} {}: on average the confidence is more than {} points from how often the "
                "answer is right."
            ).format(_most(names), _are(names), word, fixed(100 * _CALIBRATION, 0)),
        )


def overfitting(results: Results) -> Iterator[Notice]:
    """A validation loss that was clearly lower before the end."""
    epochs = results.settings.get("epochs")
    # Members of an ensemble train one after another: only the first one's course is looked at.
    last = epochs if isinstance(epochs, int) else None
    names = []
    for method in results.methods:
        rows = [row for run in method.runs[:1] for row in run.history if "validation_nll" in row]
        losses = [row["validation_nll"] for row in rows[:last]]
        if losses and losses[-1] > _OVERFITTING * min(losses):
            best = losses.index(min(losses)) + 1
            course = f"{significant(min(losses))} after epoch {best}, {significant(losses[-1])} at the end"
            names.append(_with(method, course))
    if names:
        yield Notice(
            True,
            Markup(
                "The NLL on held-out data rose again for {}: overfitting. Train for fewer epochs or "
                "use a stronger prior."
            ).format(_most(names)),
        )


def blind_to_the_unfamiliar(results: Results) -> Iterator[Notice]:
    """More certain about unfamiliar inputs than about familiar ones."""
    names = [
        _with(method, f"AUROC {fixed(value, 2)}")
        for value, method in sorted(results.scored("auroc_ood"), key=_value)
        if value < 0.5
    ]
    if names:
        yield Notice(
            True,
            Markup(
                "{} {} surer about unfamiliar inputs than about test inputs: here entropy is no alarm."
            ).format(_most(names), _are(names)),
        )


def prior_ignored(results: Results) -> Iterator[Notice]:
    """A KL term so small that the loss is that of a point estimate."""
    names = []
    for method in results.methods:
        for run in method.runs[:1]:
            row = run.history[-1] if run.history else {}
            kl, nll = row.get("kl"), row.get("nll")
            if kl is None or nll is None or kl + nll <= 0 or kl < 0:
                continue
            share = kl / (kl + nll)
            if share < _KL_SHARE:
                names.append(_with(method, f"KL is {_small_share(share)} of the loss"))
    if names:
        yield Notice(
            True,
            Markup(
                "{}: this is a point estimate. Look whether train_size is right, and give the prior its "
                "full weight."
            ).format(_most(names)),
        )


def not_converged(results: Results) -> Iterator[Notice]:
    """Chains that do not agree with each other."""
    names = []
    for method in results.methods:
        worst = max((r.extras.rhat for r in method.runs if r.extras.rhat is not None), default=None)
        if worst is not None and worst > _RHAT:
            names.append(_with(method, f"R-hat {fixed(worst, 2)}"))
    if names:
        yield Notice(
            True,
            Markup(
                "{}: not converged. The chains still differ more than one chain varies; run them longer "
                "or with a smaller step."
            ).format(_most(names)),
        )


def _small_share(share: float) -> str:
    return percent(share) if share >= 0.0005 else f"less than {percent(0.0005, 2)}"


def no_disagreement(results: Results) -> Iterator[Notice]:
    """Draws that all say the same."""
    single = []
    for method, predictions in results.predicted:
        if float(predictions.test.epistemic.mean()) >= _NO_DISAGREEMENT:
            continue
        if predictions.draws == 1 or bool((predictions.test.epistemic < 1e-6).all()):
            single.append(method_name(method))
        else:
            yield Notice(
                True,
                Markup(
                    "{}’s {} draws agree almost everywhere: this is a point estimate in practice. "
                    "Its mutual information says little."
                ).format(method_name(method), whole(predictions.draws)),
            )
    if single:
        yield Notice(
            False,
            Markup(
                "{} {}: all draws of the weights are the same, so mutual information is zero and "
                "entropy is the only sign of doubt."
            ).format(
                _most(single),
                "is a point estimate" if len(single) == 1 else "are point estimates",
            ),
        )


def small_test_set(results: Results) -> Iterator[Notice]:
    """Differences that are within the noise of few test examples."""
    sizes = [(len(p.targets), m) for m, p in results.predicted]
    values = [scored.value for scored in results.scored("accuracy")]
    if not sizes or not values:
        return
    examples, share = min(sizes, key=lambda size: size[0])[0], sum(values) / len(values)
    low, high = wilson(share, examples)
    margin = (high - low) / 2
    if margin > 0.005:
        yield Notice(
            False,
            Markup(
                "The test set has {} examples, so an accuracy near {} is uncertain by about ±{} "
                "points."
            ).format(whole(examples), percent(share), fixed(100 * margin, 1)),
        )


def few_seeds(results: Results) -> Iterator[Notice]:
    """Differences that another seed might undo."""
    runs = [len(method.runs) for method in results.methods]
    if len(runs) > 1 and max(runs) == 1:
        yield Notice(
            False,
            Markup("Every method ran with one seed: small differences may not last with another."),
        )
    elif runs and max(runs) > 1 and min(runs) < max(runs):
        short = [method_name(m) for m in results.methods if len(m.runs) < max(runs)]
        yield Notice(
            True,
            Markup("{} finished fewer than the {} of the others.").format(
                _most(short), count(max(runs), "run")
            ),
        )


def nothing_to_detect(results: Results) -> Iterator[Notice]:
    """Scores that are undefined because there was no mistake."""
    perfect = [
        method_name(method)
        for method, predictions in results.predicted
        if bool((predictions.test.prediction == predictions.targets).all())
    ]
    if perfect:
        yield Notice(
            False,
            Markup(
                "{} made no mistake on the test set, so there is no score for noticing mistakes."
            ).format(_most(perfect)),
        )


def _most(names: Sequence[Markup]) -> Markup:
    """The names, or the first of many."""
    if len(names) <= _NAMED:
        return listing(names)
    return listing([*names[: _NAMED - 1], count(len(names) - _NAMED + 1, "other")])


def _with(method: MethodResult, aside: str) -> Markup:
    return Markup("{} ({})").format(method_name(method), aside)


def _value(scored: Scored) -> float:
    return scored.value


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


RULES: tuple[Rule, ...] = (
    unreadable,
    underfitting,
    miscalibrated,
    overfitting,
    blind_to_the_unfamiliar,
    prior_ignored,
    not_converged,
    no_disagreement,
    few_seeds,
    nothing_to_detect,
    small_test_set,
)
