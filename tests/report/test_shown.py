"""Many methods on one page, in a real browser: sorted, few at first, nothing clipped or overlapping."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from torchbayes.report import load_results, write_report

from .folders import write_folder
from .test_browser import CHROMIUM, browser, playwright

__all__ = ["browser"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
assert playwright

POINTS = {"map": 2.5, "mle": 2.45, "ogn": 2.2, "kfac": 3.4, "swa": 2.6}
POSTERIORS = {
    "dropout": 3.0, "ensemble": 2.4, "swag": 2.9, "bbb": 3.2, "hwa": 3.1, "hypernet": 1.9, "vogn": 2.3,
    "ivon": 2.35, "noisy-kfac": 2.05, "sgld": 1.8, "psgld": 2.1, "sghmc": -3.0, "sgnht": 1.85,
    "atmc": 1.95, "laplace": 2.0, "vbll": 2.8,
}  # fmt: skip
SHOWN = {"map", "ensemble", "kfac", "bbb", "hwa", "dropout"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skills = {**POSTERIORS, **POINTS}
    methods = {n: {"skill": s, "draws": 1 if n in POINTS else 8} for n, s in skills.items()}
    # Noise that all methods share leaves the order to their skill.
    return write_folder(
        tmp_path_factory.mktemp("many"), methods, extras=True, same_noise=True, epochs=3
    )


@pytest.fixture(scope="module")
def address(folder: Path) -> str:
    return write_report(folder).as_uri()


@pytest.fixture(params=[1440, 390])
def page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    size = {"width": request.param, "height": 900}
    page = browser.new_page(viewport=size, reduced_motion="reduce")
    page.goto(address)
    yield page
    page.close()


def boxes(page: Any, selector: str) -> list[tuple[str, dict[str, float]]]:
    """Return text and bounding box of every visible element."""
    found: list[tuple[str, dict[str, float]]] = page.evaluate(
        """selector => [...document.querySelectorAll(selector)]
            .map(node => [node.textContent.trim(), node.getBoundingClientRect()])
            .filter(([, box]) => box.width > 0)
            .map(([text, box]) => [text, box.toJSON()])
        """,
        selector,
    )
    return found


def check_apart(found: list[tuple[str, dict[str, float]]], width: float) -> None:
    """Check that boxes are inside the window and do not overlap by more than a hair."""
    for text, box in found:
        assert box["left"] >= 0, text
        assert box["right"] <= width, text
    for (one, a), (two, b) in combinations(found, 2):
        wide = min(a["right"], b["right"]) - max(a["left"], b["left"])
        high = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
        assert wide < 0.5 or high < 0.5, (one, two)


def rows(page: Any) -> list[str]:
    return page.evaluate(  # type: ignore[no-any-return]
        """[...document.querySelectorAll('#comparison table')][0] &&
           [...document.querySelector('#comparison table').tBodies[0].rows]
             .filter(row => row.offsetHeight > 0).map(row => row.cells[0].innerText.split('\\n')[0].trim())"""
    )


def visible_methods(page: Any) -> set[str]:
    return set(
        page.evaluate(
            """[...document.querySelectorAll('main [data-m]')]
                 .filter(node => node.getClientRects().length > 0).map(node => node.dataset.m)"""
        )
    )


def test_six_at_first_and_the_rest_after_one_click(page: Any, folder: Path) -> None:
    order = [method.name for method in load_results(folder).methods]
    losses = [method.scores["nll"] for method in load_results(folder).methods]
    assert losses == sorted(losses)  # type: ignore[type-var]
    assert rows(page) == [name for name in order if name in SHOWN]
    assert len(visible_methods(page)) == 6
    page.get_by_label("Show all 21 methods").check()
    assert rows(page) == order
    assert len(visible_methods(page)) == 21
    page.get_by_label("Show all 21 methods").uncheck()
    assert rows(page) == [name for name in order if name in SHOWN]


def test_single_methods_can_be_added(page: Any) -> None:
    page.locator("#chooser summary").click()
    page.get_by_role("checkbox", name="laplace").check()
    assert set(rows(page)) == SHOWN | {"laplace"}
    assert page.locator("#chosen").inner_text() == "7 of 21"
    page.get_by_role("button", name="All").click()
    assert page.get_by_label("Show all 21 methods").is_checked()
    page.get_by_role("checkbox", name="laplace").uncheck()
    assert len(rows(page)) == 20
    assert not page.get_by_label("Show all 21 methods").is_checked()
    page.get_by_role("button", name="First six").click()
    assert set(rows(page)) == SHOWN


def test_the_choice_works_without_a_script(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    seen = page.locator("#comparison table >> nth=0 >> tbody tr:visible")
    assert seen.count() == 6
    page.get_by_label("Show all 21 methods").check()
    assert seen.count() == 21
    page.get_by_label("Show all 21 methods").uncheck()
    page.locator("#chooser summary").click()
    page.get_by_role("checkbox", name="map").uncheck()
    assert seen.count() == 5
    context.close()


def test_nothing_is_clipped_or_covered(page: Any) -> None:
    width = page.viewport_size["width"]
    check_apart(boxes(page, ".topbar nav a, #chooser summary, #theme"), width)
    assert any(text == "Glossary" for text, _ in boxes(page, ".topbar nav a"))
    for everything in (False, True):
        page.get_by_label("Show all 21 methods").set_checked(everything)
        labels = boxes(page, "#comparison figure svg .name")
        assert len(labels) == (21 if everything else 6)
        check_apart(labels, width)
        ticks = boxes(page, "#comparison figure svg .tick")
        check_apart([*labels, *ticks], width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        if width == 1440:
            clipped = page.evaluate(
                """[...document.querySelectorAll('.scroll')].filter(node => node.checkVisibility())
                   .filter(node => node.scrollWidth > node.clientWidth + 1).map(node => node.ariaLabel)"""
            )
            assert clipped == []


def test_an_outlier_stands_at_the_edge(page: Any, folder: Path) -> None:
    page.get_by_label("Show all 21 methods").check()
    found = dict(boxes(page, "#comparison figure svg .name"))
    worst = load_results(folder).methods[-1]
    assert worst.name == "sghmc"
    assert worst.scores["nll"] is not None
    assert f"sghmc {worst.scores['nll']:.2f} ↑" in found
    (svg,) = (box for _, box in boxes(page, "#comparison figure svg.plot"))
    inside = [box for text, box in found.items() if "↑" not in text]
    # The others use most of the height.
    top, bottom = min(box["top"] for box in inside), max(box["bottom"] for box in inside)
    assert bottom - top > 0.5 * (svg["bottom"] - svg["top"])


def test_a_length_that_a_person_reads(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollHeight") <= 8 * 900
    page.get_by_role("link", name="Glossary").click()
    assert page.locator("#glossary dl").first.is_visible()  # a link into a folded part opens it
    page.close()


def test_the_headline_names_a_point_estimate_as_such(page: Any) -> None:
    title, lead = page.locator("h1").inner_text(), page.locator(".lead").inner_text()
    assert "bbb" in title
    assert "posterior" in title
    assert "kfac, a point estimate, has the best NLL" in lead
    assert "the best posterior is bbb" in lead
    assert "Unfamiliar inputs: noise" in page.locator("#comparison thead").first.inner_text()
