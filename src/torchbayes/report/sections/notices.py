"""Warnings in plain language: each rule checks the results for something readers should know."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
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
from torchbayes.train.registry import find_method, method_options

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
        serious: Whether it casts doubt on a method rather than on how to read the page.
        text: The problem and what to do about it.
    """

    serious: bool
    text: Markup


Rule = Callable[[Results], Iterator[Notice]]


def notices(results: Results) -> list[Notice]:
    """Apply every rule; serious notices come first."""
    found = [notice for rule in RULES for notice in rule(results)]
    return sorted(found, key=lambda notice: not notice.serious)


def notices_section(results: Results) -> Section | None:
    """Return the notices as a section."""
    found = notices(results)
    if not found:
        return None
    body = render("notices.html.j2", notices=found)
    return Section("notices", "Notes", "Worth knowing", body)


def _warning(text: str, *values: object) -> Notice:
    return Notice(True, Markup(text).format(*values))


def _note(text: str, *values: object) -> Notice:
    return Notice(False, Markup(text).format(*values))


def unreadable(results: Results) -> Iterator[Notice]:
    """Files that could not be read."""
    for problem in results.problems:
        yield _warning("{}", problem)


def underfitting(results: Results) -> Iterator[Notice]:
    """Less accurate than plain training of the same network."""
    baseline = results.find("map")
    base = None if baseline is None else baseline.scores.get("accuracy")
    if baseline is None or base is None:
        return
    behind = [
        _with(method, f"by {fixed(100 * (base - value), 1)} percentage points")
        for value, method in sorted(results.scored("accuracy"), key=_value)
        if base - value > _UNDERFITTING
    ]
    if behind:
        yield _warning(
            "{} {} less accurate than {}: underfitting. Train longer, or reduce the noise or the weight of "
            "the prior.",
            _most(behind), _are(behind), method_name(baseline),
        )  # fmt: skip


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
        yield _warning(
            "{} {} {}: on average, confidence and accuracy differ by more than {} percentage points.",
            _most(names), _are(names), word, fixed(100 * _CALIBRATION, 0),
        )  # fmt: skip


def overfitting(results: Results) -> Iterator[Notice]:
    """A validation loss that was clearly lower before the end."""
    epochs = results.settings.get("epochs")
    # The members of an ensemble train one after another: only the first one's losses are used.
    last = epochs if isinstance(epochs, int) else None
    names = []
    for method in results.methods:
        rows = [row for run in method.runs[:1] for row in run.history if "validation_nll" in row]
        losses = [row["validation_nll"] for row in rows[:last]]
        if losses and losses[-1] > _OVERFITTING * min(losses):
            best, end = significant(min(losses)), significant(losses[-1])
            epoch = losses.index(min(losses)) + 1
            names.append(_with(method, f"{best} after epoch {epoch}, {end} at the end"))
    if names:
        yield _warning(
            "The NLL on held-out data rose again for {}: overfitting. Train for fewer epochs or use a "
            "stronger prior.",
            _most(names),
        )


def blind_to_the_unfamiliar(results: Results) -> Iterator[Notice]:
    """More certain about unfamiliar inputs than about familiar ones."""
    names = [
        _with(method, f"AUROC {fixed(value, 2)}")
        for value, method in sorted(results.scored("auroc_ood"), key=_value)
        if value < 0.5
    ]
    if names:
        yield _warning(
            "{} {} more certain about unfamiliar inputs than about test inputs: do not rely on entropy here.",
            _most(names), _are(names),
        )  # fmt: skip


def prior_ignored(results: Results) -> Iterator[Notice]:
    """A KL term so small that the loss is that of a point estimate."""
    names = []
    for method in results.methods:
        row = method.runs[0].history[-1] if method.runs and method.runs[0].history else {}
        kl, nll = row.get("kl", -1.0), row.get("nll")
        if kl >= 0 and nll is not None and kl + nll > 0 and (share := kl / (kl + nll)) < _KL_SHARE:
            shown = percent(share) if share >= 0.0005 else f"less than {percent(0.0005, 2)}"
            names.append(_with(method, f"KL is {shown} of the loss"))
    if names:
        yield _warning(
            "{}: in effect a point estimate. Check that train_size is right, and give the prior its full "
            "weight.",
            _most(names),
        )


def not_converged(results: Results) -> Iterator[Notice]:
    """Chains that do not agree with each other."""
    worst = [(max((r.extras.rhat or 0.0 for r in m.runs), default=0.0), m) for m in results.methods]
    names = [_with(m, f"R-hat {fixed(rhat, 2)}") for rhat, m in worst if rhat > _RHAT]
    if names:
        yield _warning(
            "{}: not converged. The chains differ from each other more than each one varies; run them "
            "longer or with a smaller step size.",
            _most(names),
        )


def no_disagreement(results: Results) -> Iterator[Notice]:
    """Draws that all predict the same."""
    single = []
    for method, predictions in results.predicted:
        if float(predictions.test.epistemic.mean()) >= _NO_DISAGREEMENT:
            continue
        if predictions.draws == 1 or bool((predictions.test.epistemic < 1e-6).all()):
            single.append(method_name(method))
        else:
            yield _warning(
                "{}’s {} draws agree almost everywhere: in practice, this is a point estimate. Its mutual "
                "information says little.",
                method_name(method), whole(predictions.draws),
            )  # fmt: skip
    if single:
        yield _note(
            "{} {}: all draws of the weights are identical, so mutual information is zero and entropy is "
            "the only measure of uncertainty.",
            _most(single), "is a point estimate" if len(single) == 1 else "are point estimates",
        )  # fmt: skip


def linearised(results: Results) -> Iterator[Notice]:
    """What a Laplace posterior is over, and how it predicts."""
    for method in results.methods:
        run = method.runs[0] if method.runs else None
        precision = run.history[-1].get("laplace_precision") if run and run.history else None
        if run is None or precision is None:
            continue
        known = method_options(find_method("laplace"))
        structure, subset, curvature = (
            run.extras.options.get(name, known[name].default)
            for name in ("structure", "subset", "curvature")
        )
        yield _note(
            "{}: the curvature is {}, {} over {}, "
            "with a prior precision of {}. Predictions here are not linearised: they draw weights and run "
            "the network itself.",
            method_name(method),
            "the squares of the data's own gradients (empirical Fisher)" if curvature == "empirical"
            else "that of the network linearised in its weights (Gauss–Newton)",
            str(structure).replace("_", "-"),
            {"last_layer": "the last layer", "all": "all weights"}.get(subset, subset),
            significant(float(precision)),
        )  # fmt: skip


def few_seeds(results: Results) -> Iterator[Notice]:
    """Differences that another seed might undo."""
    runs = [len(method.runs) for method in results.methods]
    if len(runs) > 1 and max(runs) == 1:
        yield _note("Every method ran with one seed: small differences may not hold with another.")
    elif runs and max(runs) > 1 and min(runs) < max(runs):
        short = [method_name(m) for m in results.methods if len(m.runs) < max(runs)]
        most = count(max(runs), "run")
        yield _warning("{} finished fewer than the {} of the others.", _most(short), most)


def nothing_to_detect(results: Results) -> Iterator[Notice]:
    """Scores that are undefined because there was no mistake."""
    perfect = [
        method_name(method)
        for method, predictions in results.predicted
        if bool((predictions.test.prediction == predictions.targets).all())
    ]
    if perfect:
        yield _note(
            "{} made no mistakes on the test set, so scores for detecting mistakes are undefined.",
            _most(perfect),
        )


def small_test_set(results: Results) -> Iterator[Notice]:
    """Differences within the noise of few test examples."""
    values = [scored.value for scored in results.scored("accuracy")]
    if not results.predicted or not values:
        return
    examples = min(len(predictions.targets) for _, predictions in results.predicted)
    share = sum(values) / len(values)
    low, high = wilson(share, examples)
    margin = (high - low) / 2
    if margin > 0.005:
        yield _note(
            "The test set has {} examples, so an accuracy near {} is uncertain by about ±{} percentage "
            "points.",
            whole(examples), percent(share), fixed(100 * margin, 1),
        )  # fmt: skip


def _most(names: Sequence[Markup]) -> Markup:
    """List the names, or the first of many."""
    if len(names) <= _NAMED:
        return listing(names)
    return listing([*names[: _NAMED - 1], count(len(names) - _NAMED + 1, "other")])


def _with(method: MethodResult, aside: str) -> Markup:
    return Markup("{} ({})").format(method_name(method), aside)


_value = operator.attrgetter("value")


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


RULES: tuple[Rule, ...] = (
    unreadable, underfitting, miscalibrated, overfitting, blind_to_the_unfamiliar, prior_ignored,
    not_converged, no_disagreement, linearised, few_seeds, nothing_to_detect, small_test_set,
)  # fmt: skip
