"""The page in a real browser: silent, self-contained, usable on narrow screens and by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchbayes.report import write_report

from .folders import write_folder

CHROMIUM = shutil.which("chromium")
HOSTILE = "<img src=x onerror=alert(1)>"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("comparison")
    methods: dict[str, dict[str, Any]] = {
        "map": {"draws": 1, "skill": 1.5}, "dropout": {"skill": 3.0}, "ensemble": {"skill": 2.0},
    }  # fmt: skip
    write_folder(folder, methods, seeds=(0, 1), classes=[HOSTILE, "b", "c", "d"], extras=True)
    return write_report(folder).as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page without smooth scrolling, which would move elements under the pointer."""
    page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    page.goto(address)
    yield page
    page.close()


def column(page: Any, number: int) -> list[str]:
    """Return the texts of a column of the main table, from top to bottom."""
    return page.locator(
        f"#comparison table >> nth=0 >> tbody tr > :nth-child({number})"
    ).all_inner_texts()


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_silent_and_within_the_window(browser: Any, address: str, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    noise: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("dialog", lambda dialog: noise.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.wait_for_load_state("networkidle")
    assert noise == []
    assert [url for url in requests if not url.startswith("data:")] == [address]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(253, 252, 250)", "dark": "rgb(21, 23, 27)"}[scheme]
    page.close()


def test_the_button_changes_the_theme(browser: Any, address: str) -> None:
    page = browser.new_page(color_scheme="light")
    page.goto(address)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.close()


def test_readable_without_javascript(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.get_by_role("heading", level=1).is_visible()
    assert page.get_by_role("table").first.is_visible()
    assert page.locator("svg.plot").first.is_visible()
    assert not page.locator("#theme").is_visible()
    context.close()


def test_the_first_tab_offers_to_skip_the_menu(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.close()


def test_figures_are_drawn_on_paper(browser: Any, address: str) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(address)
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#calibration .marker").first.is_visible()
    assert not page.locator("#glossary dl").first.is_visible()  # folded
    assert not page.locator("nav").is_visible()
    page.close()


def test_sorting(page: Any) -> None:
    names = lambda: [text.split()[0] for text in column(page, 1)]  # noqa: E731
    values = lambda: [float(text.split()[0]) for text in column(page, 3)]  # noqa: E731
    before = names()
    assert values() == sorted(values())  # sorted by NLL from the start
    assert before == ["dropout", "ensemble", "map"]
    page.get_by_role("button", name="Sort by Method").first.click()
    page.get_by_role("button", name="Sort by Method").first.click()
    assert names() == before[::-1]
    header = page.locator("#comparison th", has_text="NLL").first
    button = page.get_by_role("button", name="Sort by NLL").first
    button.focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"  # a low NLL is good: the best on top
    assert values() == sorted(values())
    button.click()
    assert header.get_attribute("aria-sort") == "descending"
    assert values() == sorted(values(), reverse=True)
    page.get_by_role("button", name="Sort by Accuracy").first.click()
    assert header.get_attribute("aria-sort") is None
    shares = [float(text.split()[0]) for text in column(page, 2)]
    assert shares == sorted(shares, reverse=True)


def test_choosing_methods(page: Any) -> None:
    page.locator("#chooser summary").click()
    number = page.get_by_role("checkbox", name="dropout").get_attribute("value")
    everywhere = page.locator(f'[data-m="{number}"]')
    assert everywhere.count() > 30
    page.get_by_role("checkbox", name="dropout").uncheck()
    assert page.locator("#chosen").inner_text() == "2 of 3"
    assert not any(node.is_visible() for node in everywhere.all())
    assert page.locator("#comparison tbody tr:visible").count() == 2
    page.get_by_role("button", name="None").click()
    assert not page.locator("#comparison tbody tr").first.is_visible()
    page.get_by_role("button", name="All").click()
    assert everywhere.first.is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("checkbox", name="dropout").is_visible()


def test_picking_an_image(page: Any) -> None:
    thumbs = page.locator(".thumb")
    first, third = thumbs.nth(0), thumbs.nth(2)
    assert first.get_attribute("aria-pressed") == "true"
    assert not page.locator("#cards").is_visible()
    third.click()
    assert [t.get_attribute("aria-pressed") for t in (first, third)] == ["false", "true"]
    assert page.locator("#picked-image").get_attribute("src") == third.locator("img").get_attribute(
        "src"
    )
    rows = third.get_attribute("data-probs").split(";")
    for row, shown in zip(rows, page.locator(".heat tbody tr").all(), strict=True):
        probs = [int(part) / 10 for part in row.split(",")]
        cells = shown.locator(".cell").all_inner_texts()
        for share, text in zip(probs, cells, strict=True):
            assert share < 0.5 if text == "·" else abs(float(text.split()[0]) - share) <= 0.5
        assert sum(probs) == pytest.approx(100, abs=0.5)
    page.keyboard.press("ArrowRight")
    assert thumbs.nth(3).get_attribute("aria-pressed") == "true"
    assert HOSTILE in page.locator(".heat thead").inner_text()
    assert page.locator("img[src=x]").count() == 0


def test_values_at_the_pointer(page: Any) -> None:
    chart = page.locator("#draws svg[data-x]").first
    chart.scroll_into_view_if_needed()
    # The scroll event, which hides the values, comes with the next frame: let it pass first.
    frames = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.evaluate(frames)
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.5)
    tip = page.locator("#tip")
    assert tip.is_visible()
    words = tip.inner_text().split()
    assert words[:3] == ["draws", "averaged", "8"]
    shown = float(words[words.index("dropout") + 1])
    label = chart.get_attribute("aria-label")
    assert label.startswith("NLL")
    told = float(label.split("dropout: ")[1].split(" with 8")[0].split()[-1])
    assert shown == pytest.approx(told, rel=5e-3)
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().split()[:3] == ["draws", "averaged", "2"]


def test_hints_of_bars(page: Any) -> None:
    page.locator("#calibration summary").click()
    bars = page.locator("#calibration rect.bar").all()
    bar = max(bars, key=lambda bar: float(bar.get_attribute("height")))
    bar.hover()
    assert "sure" in page.locator("#tip").inner_text()


def test_everything_is_there_without_javascript(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator("#cards").is_visible()
    for hidden in ("#picker", "#tip", "[data-choose]"):
        assert not page.locator(hidden).first.is_visible()
    assert page.locator("button:visible").count() == 0
    context.close()
