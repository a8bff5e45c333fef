"""The README's tables say what the records say; its picture can be read."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.transforms import Bbox

from tools.records.claims import Claim, judge
from tools.records.headline import headline_picture
from tools.records.readme import HEADLINE, filled_in
from torchbayes.experiments.record import Figure, Record, record_of
from torchbayes.train.registry import METHODS

TEXT = "# Title\n\n<!-- headline -->\nOLD\n<!-- /headline -->\nkept\n<!-- claims -->\n<!-- /claims -->\n"
CLAIM = Claim("A paper", "Table 1", "It is good", "1 %", {"e": "a/b#map/nll"}, "{e:.2f}", "e < 1")


@pytest.fixture
def record() -> Record:
    """A record of every method whose scores are drawn at random."""
    draw = random.Random(0)

    def run(seed: int) -> dict[str, float | int]:
        scores = {"accuracy": draw.uniform(0.8, 0.9), "nll": draw.gauss(0.4, 0.02)}
        names = ("ece", "auroc_misclassification", "auroc_ood", "auroc_noise")
        scores |= {name: draw.uniform(0.5, 1) for name in names}
        return scores | {"seed": seed, "seconds": 1.0, "stored": 200.0, "parameters": 100.0}

    results = {
        "created": "2026-01-02T03:04:05+00:00",
        "settings": {"epochs": 3, "examples": 1000, "samples": 4, "seeds": [0, 1], "seed": 0},
        "methods": {name: {"settings": {}, "runs": [run(0), run(1)]} for name in METHODS},
    }
    return record_of(HEADLINE, "A title", "full", f"torchbayes recipes run {HEADLINE}", results)


def rows(text: str) -> dict[str, list[float]]:
    """The table's numbers by method, in its order."""
    lines = re.findall(r"^\| `(.+?)` \| (.*) \|$", text, re.MULTILINE)
    return {
        method: [float(cell.strip("* %")) for cell in cells.split(" | ")] for method, cells in lines
    }


def test_the_table_has_the_records_methods_and_numbers(record: Record) -> None:
    text = filled_in(TEXT, [judge(CLAIM, {})], {HEADLINE: record})
    found = rows(text)
    assert found.keys() == METHODS.keys()
    assert list(found) == sorted(found, key=lambda method: record.rows[method]["nll"].mean)
    names = ("nll", "ece", "auroc_misclassification", "auroc_ood", "auroc_noise")
    for method, (accuracy, *others, stored) in found.items():
        scores = record.rows[method]
        assert accuracy == pytest.approx(100 * scores["accuracy"].mean, abs=0.0501)
        assert others == pytest.approx([scores[name].mean for name in names], abs=0.000501)
        assert stored == 2
    assert "OLD" not in text
    assert "kept" in text
    assert record.command in text
    assert filled_in(text, [judge(CLAIM, {})], {HEADLINE: record}) == text


def test_the_best_of_a_column_is_bold(record: Record) -> None:
    text = filled_in(TEXT, [], {HEADLINE: record})
    (first, *_) = re.findall(r"^\| `.*$", text, re.MULTILINE)
    assert first.split(" | ")[2].startswith("**")  # sorted by NLL
    best = max(scores["auroc_noise"].mean for scores in record.rows.values())
    assert f"**{best:.3f}**" in text
    ece = min(scores["ece"].mean for scores in record.rows.values())
    assert f"**{ece:.3f}**" in text


@pytest.mark.parametrize("lost", ["hwa", "map"])
def test_a_method_that_was_not_measured_has_no_row_and_no_dot(record: Record, lost: str) -> None:
    less = replace(record, rows={m: s for m, s in record.rows.items() if m != lost})
    found = rows(filled_in(TEXT, [], {HEADLINE: less}))
    assert found.keys() == METHODS.keys() - {lost}
    for axes, score in zip(headline_picture(less).axes, ("auroc_ood", "auroc_noise"), strict=True):
        assert {text.get_text() for text in axes.texts}.isdisjoint({lost})
        heights = [line.get_ydata()[0] for line in axes.lines if line.get_marker() in set("oDs^")]
        assert sorted(heights) == sorted(scores[score].mean for scores in less.rows.values())


def test_families_differ_in_colour_and_shape(record: Record) -> None:
    axes = headline_picture(record).axes[0]
    marks: dict[str, set[tuple[str, str]]] = {}
    for line in axes.lines:
        for method, scores in record.rows.items():
            if line.get_ydata()[0] == scores["auroc_ood"].mean and line.get_marker() != "None":
                mark = (line.get_color(), line.get_marker())
                marks.setdefault(METHODS[method].family, set()).add(mark)
    assert len(marks) == 4
    assert all(len(found) == 1 for found in marks.values())
    pairs = [next(iter(found)) for found in marks.values()]
    assert len({colour for colour, _ in pairs}) == len({shape for _, shape in pairs}) == 4


def test_a_row_that_is_no_method_is_named(record: Record) -> None:
    rows = {"maps": record.rows["map"]}
    with pytest.raises(ValueError, match="there is no method 'maps'"):
        headline_picture(replace(record, rows=rows))


def test_claims_are_counted_by_verdict(record: Record) -> None:
    scores = {"nll": Figure.of([0.5])}
    other = replace(record, recipe="a/b", rows={"map": scores})
    claims = [CLAIM, replace(CLAIM, reproduced="e > 1"), replace(CLAIM, figures={}), CLAIM]
    text = filled_in(TEXT, [judge(claim, {"a/b": other}) for claim in claims], {"a/b": other})
    assert "| A paper | 2 | 0 | 1 | 1 |" in text
    assert "OLD" in text  # there is no record of the headline


def test_a_text_without_markers_stays(record: Record) -> None:
    assert filled_in("# Mine\n", [judge(CLAIM, {})], {HEADLINE: record}) == "# Mine\n"


def test_the_pictures_names_are_inside_and_do_not_cover_each_other(record: Record) -> None:
    figure = headline_picture(record)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes in figure.axes:
        texts = [text for text in axes.texts if text.get_text().split(":")[0] in METHODS]
        assert len(texts) == len(METHODS)
        boxes = [text.get_window_extent(renderer) for text in texts]
        for one, two in combinations(boxes, 2):
            shared = Bbox.intersection(one, two)
            assert shared is None or shared.width * shared.height < 0.05 * one.width * one.height
        frame = axes.get_window_extent(renderer)
        assert all(frame.x0 - 5 < box.x0 and box.x1 < frame.x1 + 5 for box in boxes)


def test_a_method_far_out_is_at_the_edge_with_its_number(record: Record) -> None:
    rows = record.rows | {"kfac": record.rows["kfac"] | {"nll": Figure.of([2.346])}}
    figure = headline_picture(replace(record, rows=rows))
    for axes in figure.axes:
        assert axes.get_xlim()[1] < 1
        assert "kfac: NLL 2.35 →" in {text.get_text() for text in axes.texts}
