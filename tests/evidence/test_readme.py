"""The README's tables say what the records say, of every method; the picture can be read."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.transforms import Bbox

from torchbayes.evidence import Claim, Record, filled_in, read_claims, read_records, results_page
from torchbayes.evidence.headline import FAMILIES, headline_picture
from torchbayes.evidence.readme import HEADLINE
from torchbayes.experiments.recipes import claims_file
from torchbayes.experiments.record import Figure, record_of
from torchbayes.train.registry import METHODS

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "results" / f"{HEADLINE}.json"
TEXT = "# Title\n\n<!-- headline -->\nOLD\n<!-- /headline -->\nkept\n<!-- claims -->\n<!-- /claims -->\n"
CLAIM = Claim("A paper", "Table 1", "It is good", "1 %", {"e": "a/b#map/nll"}, "{e:.2f}", "e < 1")


@pytest.fixture
def record() -> Record:
    """A record whose scores are drawn at random."""
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


def test_the_table_has_every_method_with_the_records_numbers(record: Record) -> None:
    text = filled_in(TEXT, [CLAIM], {HEADLINE: record})
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
    assert filled_in(text, [CLAIM], {HEADLINE: record}) == text


def test_the_best_of_a_column_is_bold(record: Record) -> None:
    text = filled_in(TEXT, [], {HEADLINE: record})
    (first, *_) = re.findall(r"^\| `.*$", text, re.MULTILINE)
    assert first.split(" | ")[2].startswith("**")  # sorted by NLL
    best = max(scores["auroc_noise"].mean for scores in record.rows.values())
    assert f"**{best:.3f}**" in text
    ece = min(scores["ece"].mean for scores in record.rows.values())
    assert f"**{ece:.3f}**" in text


def test_a_method_without_a_row_is_named(record: Record) -> None:
    less = replace(record, rows={m: s for m, s in record.rows.items() if m != "hwa"})
    with pytest.raises(ValueError, match="lacks hwa: add it to the recipe"):
        filled_in(TEXT, [], {HEADLINE: less})


def test_claims_are_counted_by_verdict(record: Record) -> None:
    scores = {"nll": Figure.of([0.5])}
    other = replace(record, recipe="a/b", rows={"map": scores})
    claims = [CLAIM, replace(CLAIM, reproduced="e > 1"), replace(CLAIM, figures={}), CLAIM]
    text = filled_in(TEXT, claims, {"a/b": other})
    assert "| A paper | 2 | 0 | 1 | 1 |" in text
    assert "OLD" in text  # there is no record of the headline


def test_a_text_without_markers_stays(record: Record) -> None:
    assert filled_in("# Mine\n", [CLAIM], {HEADLINE: record}) == "# Mine\n"


def test_every_method_has_a_family() -> None:
    assert sorted(m for methods, _, _ in FAMILIES.values() for m in methods) == sorted(METHODS)


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


def test_readme_and_results_page_are_what_the_records_give() -> None:
    claims, records = read_claims(claims_file()), read_records(ROOT / "results")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert filled_in(readme, claims, records) == readme, "run torchbayes recipes results"
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert results_page(claims, records) == page, "run torchbayes recipes results"


@pytest.mark.skipif(not RECORD.is_file(), reason="the headline has not been run")
def test_the_headline_record_has_every_method() -> None:
    assert read_records(ROOT / "results")[HEADLINE].rows.keys() == METHODS.keys()
