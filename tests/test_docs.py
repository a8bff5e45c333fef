"""The documentation: every Python block runs, every method has a page, every page is in the menu."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

from torchbayes.train.methods import METHODS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


def test_there_is_code() -> None:
    assert {page.stem for page in WITH_CODE} >= {"index", "scale", "after-training"}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for number, block in enumerate(blocks):
        exec(compile(textwrap.dedent(block), f"{page.name} block {number}", "exec"), names)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_has_a_page_with_its_settings(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    assert f"::: {METHODS[name].__module__}.{METHODS[name].__name__}" in text
    assert "## What goes wrong" in text


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        assert f" {page.relative_to(ROOT / 'docs').as_posix()}\n" in menu, page


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.(?:md|png))", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
