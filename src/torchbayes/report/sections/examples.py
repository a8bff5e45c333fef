"""Pictures of single inputs: sure and wrong, most uncertain, and unfamiliar yet sure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from markupsafe import Markup
from torch import Tensor

from torchbayes.report.fragment import Section, render
from torchbayes.report.pictures import data_uri, value_range
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Axis, Panel, colour, element, marker
from torchbayes.report.wording import fixed, method_name, percent

__all__ = ["examples_section"]

_PICKED, _CARDS = 10, 4
_CLASSES = 4
_COLUMNS = 12


@dataclass(frozen=True)
class Card:
    """One input.

    Attributes:
        picture: A data URI.
        alt: What the picture is of.
        text: What the methods make of it.
        chart: The probabilities that they give, or None if it is only to be picked.
        methods: The numbers of the methods that the rows below are of, as text for the script.
        classes: The classes that the picker's table shows, likewise.
        true: The true class, or None.
        probs: Thousandths of each method's probability of those classes, as text for the script.
        doubts: Thousandths of each method's entropy and mutual information, likewise.
    """

    picture: str
    alt: str
    text: Markup
    chart: Markup | None
    methods: str
    classes: str
    true: int | None
    probs: str
    doubts: str


@dataclass(frozen=True)
class Group:
    """Inputs that have something in common.

    Attributes:
        title: What they have in common.
        text: How they were chosen.
        cards: The inputs.
    """

    title: str
    text: str
    cards: list[Card]


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs that have pictures, with what every method makes of them.

    Attributes:
        results: Whose they are.
        methods: The methods.
        probs: Their probabilities, (methods, examples, classes).
        information: Their mutual information, (methods, examples).
        targets: The true classes, or None.
        pictures: (examples, channels, height, width).
    """

    results: Results
    methods: list[MethodResult]
    probs: Tensor
    information: Tensor
    targets: Tensor | None
    pictures: npt.NDArray[Any]

    def entropy(self) -> Tensor:
        """The entropy of every example, averaged over methods."""
        entropy: Tensor = torch.special.entr(self.probs).sum(2).mean(0)
        return entropy

    def card(self, index: int, text: Markup, kind: str, chart: bool) -> Card:
        """The card of an example."""
        true = None if self.targets is None else int(self.targets[index])
        alt = f"{kind} {index}" + (
            "" if true is None else f", of class {self.results.class_name(true)}"
        )
        classes = self._columns(index, true)
        probs, entropy = self.probs[:, index], torch.special.entr(self.probs[:, index]).sum(1)
        return Card(
            data_uri(self.pictures[index], value_range(self.pictures)),
            alt,
            text,
            _dots(self, index, true) if chart else None,
            ",".join(str(method.index) for method in self.methods),
            ",".join(map(str, classes)),
            true,
            _thousandths(probs[:, classes]),
            _thousandths(torch.stack([entropy, self.information[:, index]], 1)),
        )

    def _columns(self, index: int, true: int | None) -> list[int]:
        """All classes, or of many the likeliest and the true one, in their order."""
        count = self.probs.shape[2]
        if count <= _COLUMNS:
            return list(range(count))
        likely = self.probs[:, index].mean(0).sort(descending=True, stable=True).indices
        shown: list[int] = likely[:_COLUMNS].tolist()
        if true is not None and true not in shown:
            shown[-1] = true
        return sorted(shown)


def _thousandths(table: Tensor) -> str:
    """Rows of whole numbers with commas between, and semicolons between rows."""
    rows = (1000 * table.double()).round().long().tolist()
    return ";".join(",".join(map(str, row)) for row in rows)


def examples_section(results: Results) -> Section | None:
    """Three groups of pictures, each left out if there is nothing to show."""
    if results.images is None or not results.predicted:
        return None
    known = _test_inputs(results)
    groups = [_sure_and_wrong(known), _uncertain(known), _unlike_the_rest(known)]
    foreign = _foreign_inputs(results)
    if foreign is not None:
        groups.append(_sure_of_the_unfamiliar(foreign))
    groups = [group for group in groups if group.cards]
    if not groups:
        return None
    names = [results.class_name(index) for index in range(known.probs.shape[2])]
    body = render(
        "examples.html.j2",
        groups=groups,
        methods=known.methods,
        names=names,
        columns=min(len(names), _COLUMNS),
    )
    return Section("examples", "Hard cases", "The hard cases", body)


def _test_inputs(results: Results) -> Inputs:
    assert results.images is not None
    targets = results.predicted[0][1].targets
    same = [(m, p) for m, p in results.predicted if torch.equal(p.targets, targets)]
    pictures = results.images.test[: len(targets)]
    probs = torch.stack([p.probs[: len(pictures)].double() for _, p in same])
    doubt = torch.stack([p.test.epistemic[: len(pictures)].double() for _, p in same])
    return Inputs(results, [m for m, _ in same], probs, doubt, targets[: len(pictures)], pictures)


def _foreign_inputs(results: Results) -> Inputs | None:
    assert results.images is not None
    pairs = [(m, p.ood) for m, p in results.predicted if p.ood is not None]
    if results.images.ood is None or not pairs:
        return None
    same = [(m, p) for m, p in pairs if p.probs.shape == pairs[0][1].probs.shape]
    pictures = results.images.ood[: len(same[0][1])]
    probs = torch.stack([p.probs[: len(pictures)].double() for _, p in same])
    doubt = torch.stack([p.epistemic[: len(pictures)].double() for _, p in same])
    return Inputs(results, [m for m, _ in same], probs, doubt, None, pictures)


def _sure_and_wrong(inputs: Inputs) -> Group:
    assert inputs.targets is not None
    confidence, guess = inputs.probs.max(2)
    wrong = guess != inputs.targets
    blame = (confidence * wrong).mean(0)
    cards = []
    for place, index in enumerate(_top(blame)):
        surest = int((confidence[:, index] * wrong[:, index]).argmax())
        text = Markup("It is <b>{}</b>. {} is {} sure it is {}; {} wrong.").format(
            inputs.results.class_name(int(inputs.targets[index])),
            method_name(inputs.methods[surest]),
            percent(float(confidence[surest, index])),
            inputs.results.class_name(int(guess[surest, index])),
            _how_many(int(wrong[:, index].sum()), len(inputs.methods)),
        )
        cards.append(inputs.card(index, text, "test picture", place < _CARDS))
    return Group(
        "Sure and wrong",
        "The test inputs with the most confidence in a wrong class, averaged over methods.",
        cards,
    )


def _uncertain(inputs: Inputs) -> Group:
    assert inputs.targets is not None
    entropy = inputs.entropy()
    cards = []
    for place, index in enumerate(_top(entropy)):
        right = int((inputs.probs[:, index].argmax(1) == inputs.targets[index]).sum())
        text = Markup("It is <b>{}</b>. Entropy {} nats; {} right.").format(
            inputs.results.class_name(int(inputs.targets[index])),
            fixed(float(entropy[index]), 2),
            _how_many(right, len(inputs.methods)),
        )
        cards.append(inputs.card(index, text, "test picture", place < _CARDS))
    return Group(
        "Most uncertain", "The test inputs with the most entropy, averaged over methods.", cards
    )


def _unlike_the_rest(inputs: Inputs) -> Group:
    assert inputs.targets is not None
    doubt = inputs.information.mean(0)
    cards = []
    for place, index in enumerate(_top(torch.where(doubt > 1e-6, doubt, 0.0))):
        text = Markup("It is <b>{}</b>. Mutual information {} nats; {} right.").format(
            inputs.results.class_name(int(inputs.targets[index])),
            fixed(float(doubt[index]), 3),
            _how_many(
                int((inputs.probs[:, index].argmax(1) == inputs.targets[index]).sum()),
                len(inputs.methods),
            ),
        )
        cards.append(inputs.card(index, text, "test picture", place < _CARDS))
    return Group(
        "Least like the training data",
        "The test inputs on which draws of the weights disagree most, averaged over methods: the ones "
        "that the methods themselves find most out of distribution.",
        cards,
    )


def _sure_of_the_unfamiliar(inputs: Inputs) -> Group:
    confidence, guess = inputs.probs.max(2)
    cards = []
    for place, index in enumerate(_top(confidence.mean(0))):
        surest = int(confidence[:, index].argmax())
        text = Markup("It is none of the classes. {} is {} sure it is {}.").format(
            method_name(inputs.methods[surest]),
            percent(float(confidence[surest, index])),
            inputs.results.class_name(int(guess[surest, index])),
        )
        cards.append(inputs.card(index, text, "unfamiliar picture", place < _CARDS))
    return Group(
        "Unfamiliar, and yet sure",
        "The out-of-distribution inputs with the most confidence, averaged over methods.",
        cards,
    )


def _how_many(some: int, all_: int) -> str:
    """How many of the methods are something."""
    if all_ == 1:
        return "it is" if some else "it is not"
    if some in (0, all_):
        return "all methods are" if some else "no method is"
    return f"{some} of {all_} methods {'is' if some == 1 else 'are'}"


def _top(score: Tensor) -> list[int]:
    """The examples with the highest score above zero, the first of equals first."""
    order: list[int] = score.sort(descending=True, stable=True).indices[:_PICKED].tolist()
    return [index for index in order if float(score[index]) > 0]


def _dots(inputs: Inputs, index: int, true: int | None) -> Markup:
    """A row for each of the likeliest classes, with a mark where each method puts it."""
    probs = inputs.probs[:, index]
    likely: list[int] = probs.mean(0).sort(descending=True, stable=True).indices.tolist()
    # At least two rows, and no rows for classes that nobody believes in.
    serious = int((probs.amax(0) >= 0.01).sum())
    shown = likely[: min(_CLASSES, max(2, serious))]
    if true is not None and true not in shown:
        shown[-1] = true
    # Marks of one row lie on slightly different heights, so that equal ones stay visible.
    row_height = min(max(24.0, 4.0 * len(inputs.methods)), 48.0)
    height = 34 + row_height * len(shown)
    x = Axis(0, 1, "", (0.0, 0.5, 1.0), lambda value: f"{100 * value:g} %")
    y = Axis(len(shown) - 0.5, -0.5, "", ())
    panel = Panel(x, y, 290, height, left=96, top=6, bottom=26, right=20)
    for row, class_ in enumerate(shown):
        middle = panel.at_y(row)
        panel.add("line", x1=96, x2=270, y1=middle, y2=middle, class_="grid")
        style = "name true" if class_ == true else "name"
        panel.write(_short(inputs.results.class_name(class_)), 86, middle + 4, "end", style)
        for number, method in enumerate(inputs.methods):
            share = float(probs[number, class_])
            step = (number + 0.5) / len(inputs.methods) - 0.5
            node = marker(method.index, panel.at_x(share), middle + 0.6 * row_height * step)
            node.set("class", f"marker {colour(method.index)}")
            hint = f"{method.name}: {inputs.results.class_name(class_)} {percent(share)}"
            node.set("data-m", str(method.index))
            node.append(element("title", hint))
            panel.nodes.append(node)
    said = ", ".join(
        f"{method.name} {inputs.results.class_name(int(p.argmax()))} {percent(float(p.max()), 0)}"
        for method, p in zip(inputs.methods, probs, strict=True)
    )
    return panel.draw(f"Probabilities of the likeliest classes; first choices: {said}.")


def _short(text: str) -> str:
    return text if len(text) <= 11 else text[:10] + "…"
