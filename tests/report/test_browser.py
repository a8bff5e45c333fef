"""The page in a real browser: silent, self-sufficient, and fit for narrow screens and keyboards."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchbayes.report import write_report

from .folders import write_folder

CHROMIUM = shutil.which("chromium")
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
    methods: dict[str, dict[str, Any]] = {"map": {"draws": 1}, "dropout": {}, "ensemble": {}}
    write_folder(
        folder, methods, seeds=(0, 1), classes=["<script>alert(1)</script>", "b", "c", "d"]
    )
    return write_report(folder).as_uri()


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
    page.get_by_role("button", name="Change between light and dark").click()
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
    assert page.locator("svg rect.bar").first.is_visible()
    assert not page.locator("nav").is_visible()
    page.close()
