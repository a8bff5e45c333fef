"""Single inputs: confidently wrong, most uncertain, and unfamiliar yet confident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from markupsafe import Markup
from torch import Tensor

from torchbayes.predict.results import ClassPredictive
from torchbayes.report.fragment import Section, render
from torchbayes.report.pictures import data_uri, value_range
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Axis, Panel, marker, percent_tick
from torchbayes.report.wording import fixed, method_name, percent

__all__ = ["examples_section"]

_PICKED, _CARDS = 10, 4
_CLASSES = 4
_COLUMNS = 12


@dataclass(frozen=True)
class Card:
    """One input.

    Attributes:
        picture: Data URI.
        alt: Text alternative of the picture.
        text: What the methods predict for it.
        chart: Predicted probabilities, or None if the card is only in the picker.
        methods: Indices of the methods in the rows below, as text for the script.
        classes: Classes in the picker's table, likewise.
        true: True class, or None.
        probs: Each method's probabilities of those classes in thousandths, as text for the script.
        doubts: Each method's entropy and mutual information in thousandths, likewise.
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
    """Inputs with something in common.

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
    """Inputs that have pictures, with every method's predictions.

    Attributes:
        results: The comparison.
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

    def name(self, class_: Tensor) -> str:
        """Return the name of a class."""
        return self.results.class_name(int(class_))

    def group(
        self, title: str, text: str, score: Tensor, describe: Callable[[int], Markup]
    ) -> Group:
        """Return the examples with the highest scores above zero, the first of equals first.

        Args:
            title: What they have in common.
            text: How they were chosen.
            score: Score of every example.
            describe: Describes the predictions for an example, given its index.
        """
        order: list[int] = score.sort(descending=True, stable=True).indices[:_PICKED].tolist()
        top = [index for index in order if float(score[index]) > 0]
        cards = [self._card(i, describe(i), chart=place < _CARDS) for place, i in enumerate(top)]
        return Group(title, text, cards)

    def _card(self, index: int, text: Markup, chart: bool) -> Card:
        alt, true = f"unfamiliar picture {index}", None
        if self.targets is not None:
            true = int(self.targets[index])
            alt = f"test picture {index}, of class {self.results.class_name(true)}"
        classes = sorted(self.likeliest(index, true, _COLUMNS))
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

    def likeliest(self, index: int, true: int | None, most: int) -> list[int]:
        """Return at most `most` classes of an example, the likeliest first, and always the true one."""
        likely = self.probs[:, index].mean(0).sort(descending=True, stable=True).indices
        shown: list[int] = likely[:most].tolist()
        if true is not None and true not in shown:
            shown[-1] = true
        return shown


def _thousandths(table: Tensor) -> str:
    """Encode a table as whole thousandths: commas between numbers, semicolons between rows."""
    rows = (1000 * table.double()).round().long().tolist()
    return ";".join(",".join(map(str, row)) for row in rows)


def examples_section(results: Results) -> Section | None:
    """Show groups of single inputs; an empty group is left out."""
    if results.images is None or not results.predicted:
        return None
    if any(p.positions > 1 for _, p in results.predicted):
        return None  # a row is a pixel, not a picture
    targets = results.predicted[0][1].targets
    known = _inputs(
        results,
        [(m, p.test) for m, p in results.predicted if torch.equal(p.targets, targets)],
        results.images.test,
        targets,
    )
    groups = _test_groups(known, targets[: len(known.pictures)])
    foreign = [(m, p.ood) for m, p in results.predicted if p.ood is not None]
    if results.images.ood is not None and foreign:
        same = [(m, p) for m, p in foreign if p.probs.shape == foreign[0][1].probs.shape]
        groups.append(_sure_of_the_unfamiliar(_inputs(results, same, results.images.ood, None)))
    groups = [group for group in groups if group.cards]
    if not groups:
        return None
    names = [results.class_name(index) for index in range(known.probs.shape[2])]
    columns = min(len(names), _COLUMNS)
    body = render(
        "examples.html.j2", groups=groups, methods=known.methods, names=names, columns=columns
    )
    return Section("examples", "Hard cases", "Hard cases", body)


def _inputs(
    results: Results, predicted: Sequence[tuple[MethodResult, ClassPredictive]],
    pictures: npt.NDArray[Any], targets: Tensor | None,
) -> Inputs:  # fmt: skip
    count = min(len(pictures), len(predicted[0][1]))
    return Inputs(
        results,
        [method for method, _ in predicted],
        torch.stack([p.probs[:count].double() for _, p in predicted]),
        torch.stack([p.epistemic[:count].double() for _, p in predicted]),
        None if targets is None else targets[:count],
        pictures[:count],
    )


def _test_groups(inputs: Inputs, targets: Tensor) -> list[Group]:
    confidence, guess = inputs.probs.max(2)
    wrong = guess != targets
    misplaced = confidence * wrong
    entropy: Tensor = torch.special.entr(inputs.probs).sum(2).mean(0)
    information = inputs.information.mean(0)

    def sure_and_wrong(index: int) -> Markup:
        surest = int(misplaced[:, index].argmax())
        return Markup("It is <b>{}</b>. {} is {} sure it is {}; {} wrong.").format(
            inputs.name(targets[index]),
            method_name(inputs.methods[surest]),
            percent(float(confidence[surest, index])),
            inputs.name(guess[surest, index]),
            _how_many(wrong[:, index]),
        )

    def uncertain(index: int) -> Markup:
        name, nats = inputs.name(targets[index]), fixed(float(entropy[index]), 2)
        text = Markup("It is <b>{}</b>. Entropy {} nats; {} right.")
        return text.format(name, nats, _how_many(~wrong[:, index]))

    def unlike_the_rest(index: int) -> Markup:
        name, nats = inputs.name(targets[index]), fixed(float(information[index]), 3)
        text = Markup("It is <b>{}</b>. Mutual information {} nats; {} right.")
        return text.format(name, nats, _how_many(~wrong[:, index]))

    return [
        inputs.group(
            "Confident and wrong",
            "The test inputs with the highest confidence in a wrong class, averaged over methods.",
            misplaced.mean(0),
            sure_and_wrong,
        ),
        inputs.group(
            "Most uncertain",
            "The test inputs with the highest entropy, averaged over methods.",
            entropy,
            uncertain,
        ),
        inputs.group(
            "Least like the training data",
            "The test inputs on which draws of the weights disagree most, averaged over methods: those that "
            "the methods themselves find most unfamiliar.",
            torch.where(information > 1e-6, information, 0.0),
            unlike_the_rest,
        ),
    ]


def _sure_of_the_unfamiliar(inputs: Inputs) -> Group:
    confidence, guess = inputs.probs.max(2)

    def describe(index: int) -> Markup:
        surest = int(confidence[:, index].argmax())
        who, sure = method_name(inputs.methods[surest]), percent(float(confidence[surest, index]))
        text = Markup("It is none of the classes. {} is {} sure it is {}.")
        return text.format(who, sure, inputs.name(guess[surest, index]))

    return inputs.group(
        "Unfamiliar yet confident",
        "The unfamiliar inputs with the highest confidence, averaged over methods.",
        confidence.mean(0),
        describe,
    )


def _how_many(which: Tensor) -> str:
    """Return how many of the methods are something, with the verb."""
    some, all_ = int(which.sum()), len(which)
    if all_ == 1:
        return "it is" if some else "it is not"
    if some in (0, all_):
        return "all methods are" if some else "no method is"
    return f"{some} of {all_} methods {'is' if some == 1 else 'are'}"


def _dots(inputs: Inputs, index: int, true: int | None) -> Markup:
    """Draw a row for each of the likeliest classes, with a marker at each method's probability."""
    probs = inputs.probs[:, index]
    # At least two rows, and none for classes that no method considers.
    serious = int((probs.amax(0) >= 0.01).sum())
    shown = inputs.likeliest(index, true, min(_CLASSES, max(2, serious)))
    # Markers of one row lie at slightly different heights so that equal ones stay visible.
    row_height = min(max(24.0, 4.0 * len(inputs.methods)), 48.0)
    height = 34 + row_height * len(shown)
    x = Axis(0, 1, "", (0.0, 0.5, 1.0), percent_tick)
    y = Axis(len(shown) - 0.5, -0.5, "", ())
    panel = Panel(x, y, 290, height, left=96, top=6, bottom=26, right=20)
    for row, class_ in enumerate(shown):
        middle, name = panel.at_y(row), inputs.results.class_name(class_)
        panel.add("line", x1=96, x2=270, y1=middle, y2=middle, class_="grid")
        style = "name true" if class_ == true else "name"
        short = name if len(name) <= 11 else name[:10] + "…"
        panel.write(short, 86, middle + 4, "end", style)
        for number, method in enumerate(inputs.methods):
            share = float(probs[number, class_])
            step = (number + 0.5) / len(inputs.methods) - 0.5
            place = panel.at_x(share), middle + 0.6 * row_height * step
            hint = f"{method.name}: {name} {percent(share)}"
            node = marker(method.index, *place, hint=hint, data_m=str(method.index))
            panel.nodes.append(node)
    said = ", ".join(
        f"{method.name} {inputs.name(p.argmax())} {percent(float(p.max()), 0)}"
        for method, p in zip(inputs.methods, probs, strict=True)
    )
    return panel.draw(f"Probabilities of the likeliest classes; first choices: {said}.")
