from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient

from tools.notebooks import TUTORIALS, notebook

PAGES = sorted(TUTORIALS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_has_the_page_s_code_in_its_cells(page):
    text = page.read_text(encoding="utf-8")
    made = nbformat.reads(nbformat.writes(notebook(page)), as_version=4)
    code = [cell.source for cell in made.cells if cell.cell_type == "code"]
    assert code == [block.rstrip("\n") for block in re.findall(r"```python\n(.*?)```", text, re.S)]
    words = "\n".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
    assert text.splitlines()[0] in words
    assert "](../" not in words  # a link that works in the documentation only
    assert all("```python" not in cell.source for cell in made.cells)


def test_a_notebook_runs(tmp_path):
    made = notebook(TUTORIALS / "own-loop.md")
    NotebookClient(made, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        out.text for cell in made.cells for out in cell.get("outputs", []) if "text" in out
    )
    assert "NLL" in printed
