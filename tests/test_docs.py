"""The documentation: every Python block runs, every method has a page, every page is in the menu."""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch

import torchbayes as tb
from torchbayes.train.registry import METHODS

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
    algorithm = METHODS[name].algorithm
    assert f"::: {algorithm.__module__}.{algorithm.__name__}" in text
    assert "## What goes wrong" in text


# Their names are all public and stand on the page, those of `metrics` as a whole.
NAMESPACES = ("applications", "average", "checks", "posterior", "posthoc", "prior", "variational")


def test_every_public_name_has_its_place_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: torchbayes\.(\S+)$", page, re.MULTILINE)
    assert len(entries) == len(set(entries))
    documented = {entry.rpartition(".")[2] for entry in entries}
    assert set(tb.__all__) <= {entry for entry in entries if "." not in entry}
    for namespace in NAMESPACES:
        assert set(getattr(tb, namespace).__all__) <= documented, namespace
    for entry in entries:
        home, _, name = f"torchbayes.{entry}".rpartition(".")
        assert hasattr(importlib.import_module(home), name), entry
    sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
    order = ["Method", "Posterior", "Predictive", "Metrics"]
    assert [section for section in sections if section in order] == order


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        assert f" {page.relative_to(ROOT / 'docs').as_posix()}\n" in menu, page


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.(?:md|png))", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
