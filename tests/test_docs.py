"""The documentation: every Python block runs, every method has a page, every page is in the menu."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import torchbayes as tb
from tools.docs_site import method_sections, methods_menu, methods_table
from torchbayes.train.registry import METHODS, method_options

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# What needs other people's packages is run in tests/world.
ELSEWHERE = {"hugging-face"}
WITH_CODE = [
    page
    for page in PAGES
    if "```python" in page.read_text(encoding="utf-8") and page.stem not in ELSEWHERE
]


def test_there_is_code() -> None:
    assert {page.stem for page in WITH_CODE} >= {"index", "own-loop", "scale", "after-training"}


def run_blocks(page: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for number, block in enumerate(blocks):
        exec(compile(textwrap.dedent(block), f"{page.name} block {number}", "exec"), names)
    return names


@pytest.mark.parametrize(
    "page", WITH_CODE, ids=lambda page: page.relative_to(ROOT / "docs").as_posix()
)
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(page)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_has_a_page_with_its_settings(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    parts = [
        "When to use it", "By name and by hand", "Settings that matter", "Cost", "What goes wrong",
    ]  # fmt: skip
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading in parts] == parts
    # Both ways, in blocks that the test above runs.
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert re.search(rf'tb\.fit\([^\n]*"{name}"', code)
    by_hand = {"ensemble": "Samples.of", "laplace": "Laplace"}
    assert f"tb.{by_hand.get(name, METHODS[name].algorithm.__name__)}(" in code
    assert "tb.predictive(" in code
    # Options that are named there exist.
    settings = text.split("## Settings that matter")[1].split("\n## ")[0]
    known = {
        *method_options(METHODS[name]),
        *METHODS,
        "fit",
        "train_size",
        "ggn",
        "sampled",
        "Prior",
    }
    assert set(re.findall(r"`(\w+)`", settings)) <= known
    method, added = METHODS[name], method_sections(name)
    assert method.paper in added
    assert f"::: {method.algorithm.__module__}.{method.algorithm.__name__}\n" in added
    arguments = inspect.signature(method.algorithm).parameters
    for option in method_options(method):
        assert option in arguments or f"| `{option}` | " in added, option


def test_the_table_of_methods_links_every_method_to_its_page() -> None:
    rows = methods_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(METHODS)
    assert all(f"[`{name}`]({name}.md)" in row for name, row in zip(METHODS, rows, strict=True))


def test_every_public_name_has_its_place_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: torchbayes\.(\S+)$", page, re.MULTILINE)
    assert len(entries) == len(set(entries))
    # A new algorithm needs no line here: its section shows all of `torchbayes.optim`.
    assert "optim" in entries
    documented = {entry.rpartition(".")[2] for entry in entries}
    at_the_top = {entry for entry in entries if "." not in entry}
    assert set(tb.__all__) <= at_the_top | set(tb.optim.__all__)
    listed = re.findall(r"^::: (\S+)\n    options: {.*members: \[(.+)\]", page, re.MULTILINE)
    documented |= {name for _, members in listed for name in members.split(", ")}
    as_a_whole = {"metrics", "optim"}
    assert as_a_whole <= at_the_top
    for namespace in {*tb._NAMESPACES, "report", "sklearn", "integrations"} - as_a_whole:
        names = importlib.import_module(f"torchbayes.{namespace}").__all__
        assert set(names) <= documented, namespace
    for entry in entries:
        home, _, name = f"torchbayes.{entry}".rpartition(".")
        if home.startswith("torchbayes.integrations."):
            continue  # imports a framework, which may not be installed: the next test reads the file
        assert hasattr(importlib.import_module(home), name), entry
    for home, members in listed:
        for name in members.split(", "):
            assert hasattr(importlib.import_module(home), name), f"{home}.{name}"
    sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
    order = ["Method", "Posterior", "Predictive", "Metrics"]
    assert [section for section in sections if section in order] == order


def test_every_integration_is_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: torchbayes\.integrations\.(\w+\.\w+)$", page, re.MULTILINE))
    names = set()
    for file in (ROOT / "src" / "torchbayes" / "integrations").glob("*.py"):
        if file.stem not in ("__init__", "collector", "optimizers"):
            found = re.search(
                r"^__all__ = \[(.+?)\]", file.read_text(encoding="utf-8"), re.M | re.S
            )
            assert found is not None, file
            names |= {f"{file.stem}.{name}" for name in re.findall(r'"(\w+)"', found[1])}
    assert listed == names
    assert "::: torchbayes.integrations.Collector\n" in page


def test_every_page_is_in_the_menu() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\nhooks: [tools/docs_site.py]\n" in settings
    methods = methods_menu(ROOT / "docs")
    assert methods == ["methods/index.md", *(f"methods/{name}.md" for name in METHODS)]
    for page in PAGES:
        path = page.relative_to(ROOT / "docs").as_posix()
        assert path in methods or f" {path}\n" in settings, page


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.(?:md|png))", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
