"""Turn the tutorials into notebooks: `python -m tools.notebooks [FOLDER]`, or `make notebooks`.

The pages in docs/tutorials are the source; notebooks are made, never edited.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path, PurePosixPath

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

__all__ = ["notebook"]

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
SITE = PurePosixPath("github.com/torchbayes/torchbayes/blob/main/docs")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^):#]+\.md)")


def notebook(page: Path) -> nbformat.NotebookNode:
    """Return a page as a notebook: its Python blocks are the code cells, everything else is text.

    Blocks of other kinds, such as shell commands, stay text, so that running a notebook installs nothing.
    """
    cells = []
    text = page.read_text(encoding="utf-8")
    for place, part in enumerate(_CODE.split(text)):
        if not part.strip():
            continue
        if place % 2:
            cells.append(new_code_cell(part.rstrip("\n"), id=f"cell-{place}"))
        else:
            cells.append(new_markdown_cell(_LINK.sub(_address, part).strip(), id=f"cell-{place}"))
    made: nbformat.NotebookNode = new_notebook(cells=cells, metadata={"kernelspec": _KERNEL})
    nbformat.validate(made)
    return made


def _address(link: re.Match[str]) -> str:
    """Return a link to another page that works outside the documentation."""
    target = PurePosixPath("tutorials") / link[1]
    parts: list[str] = []
    for part in target.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return f"](https://{SITE.joinpath(*parts)}"


def main() -> None:
    """Write all notebooks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("notebooks"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(TUTORIALS.glob("*.md")):
        target = folder / f"{page.stem}.ipynb"
        nbformat.write(notebook(page), target)
        print(target)


if __name__ == "__main__":
    main()
