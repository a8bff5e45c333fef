"""The server's page in a real browser: silent, self-contained, right, and usable on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

import torchbayes as tb
from tests.report.test_browser import CHROMIUM, FLAGS

from .conftest import HOSTILE
from .running import running

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pictures(digits: Path) -> Iterator[str]:
    with running(tb.serving.app(tb.load_run(digits), 4, name="digits")) as address:
        yield address


@pytest.fixture(scope="module")
def table(cars: Path) -> Iterator[str]:
    with running(tb.serving.app(tb.load_run(cars), 4, name=HOSTILE)) as address:
        yield address


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = tb.load_data("digits").test.inputs[7, 0]
    Image.fromarray((255 * pixels).byte().numpy()).save(tmp_path / "digit.png")
    return tmp_path / "digit.png"


@contextmanager
def opened(browser: Any, address: str, width: int, scheme: str) -> Iterator[Any]:
    """Open the page; afterwards nothing was said, asked for elsewhere or wider than the window."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    noise: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("dialog", lambda dialog: noise.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.wait_for_selector("#fields > *")
    yield page
    # Chromium itself reports an answer of 422, which the tests provoke.
    assert [said for said in noise if "status of 422" not in said] == []
    assert [url for url in requests if not url.startswith((address, f"blob:{address}"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(253, 252, 250)", "dark": "rgb(21, 23, 27)"}[scheme]
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_an_image_and_its_class(
    browser: Any, pictures: str, image: Path, width: int, scheme: str
) -> None:
    sent = httpx.post(f"{pictures}/predict/image", files={"file": image.read_bytes()})
    (told,) = sent.raise_for_status().json()["predictions"]
    with opened(browser, pictures, width, scheme) as page:
        page.click("#go")
        assert page.inner_text("#error") == "choose an image first"
        page.set_input_files("#file", image)
        page.wait_for_selector("#answer:not([hidden])")
        assert not page.is_visible("#error")
        assert page.inner_text(".verdict .value") == told["prediction"]
        assert page.inner_text(".verdict .sure") == f"{100 * told['confidence']:.1f}\u00a0% sure"
        assert page.inner_text(".bars .best .who") == told["prediction"]
        chips = page.locator(".chip").all_inner_texts()
        assert chips == told["sets"]["90"]
        assert ("Abstains" in page.inner_text(".state")) == (told["risk"] is None)
        page.click("text=JSON")
        page.fill("#text", '{"inputs": [[1, 2]]}')
        page.click("#go")
        page.wait_for_selector("#error:not([hidden])")
        assert "expected [1, 8, 8]" in page.inner_text("#error")
        page.fill("#text", "nonsense")
        page.click("#go")
        page.wait_for_function(
            "document.getElementById('error').textContent.includes('not valid JSON')"
        )


@pytest.mark.parametrize(("width", "scheme"), [(1440, "dark"), (390, "light")])
def test_a_row_of_a_table_and_its_interval(
    browser: Any, table: str, width: int, scheme: str
) -> None:
    row = {"weight": 1234.5, "power": 99, "origin": HOSTILE, "doors": None}
    sent = httpx.post(f"{table}/predict", json={"rows": [row]}).raise_for_status()
    (told,) = sent.json()["predictions"]
    with opened(browser, table, width, scheme) as page:
        assert page.inner_text("h1") == HOSTILE
        page.fill("#field-0", "1234.5")
        page.fill("#field-1", "99")
        page.select_option("#field-2", HOSTILE)
        page.fill("#field-3", "")
        page.press("#field-3", "Enter")
        page.wait_for_selector("#answer:not([hidden])")
        assert float(page.inner_text(".verdict .value")) == pytest.approx(
            told["prediction"], rel=1e-3
        )
        low, high = (float(text) for text in page.locator(".tick").all_inner_texts())
        assert (low, high) == pytest.approx((told["lower90"], told["upper90"]), rel=1e-3)
        page.click("text=JSON or CSV")
        page.fill("#text", f'power;weight;doors;origin\n99;1234.5;;"{HOSTILE}"\n50;900;3;EU\n')
        page.click("#go")
        page.wait_for_selector("table")
        assert page.locator("tbody tr").count() == 2
        first = page.inner_text("tbody tr:first-child td:nth-child(2)")
        assert float(first) == pytest.approx(told["prediction"], rel=1e-3)
        page.fill("#text", "a;b\n1;2\n")
        page.click("#go")
        page.wait_for_selector("#error:not([hidden])")
        assert "lacks the columns" in page.inner_text("#error")
