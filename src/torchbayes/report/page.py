"""The page: a headline and a list of sections."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from torchbayes.core.storage import write_text
from torchbayes.report.fragment import Section, read_asset, render
from torchbayes.report.loading import load_results
from torchbayes.report.ranking import SHOWN
from torchbayes.report.results import Results
from torchbayes.report.sections.abstaining import abstaining_section
from torchbayes.report.sections.afterwards import afterwards_section
from torchbayes.report.sections.calibration import calibration_section
from torchbayes.report.sections.closing import (
    failed_section,
    glossary_section,
    inside_section,
    settings_section,
)
from torchbayes.report.sections.comparison import comparison_section
from torchbayes.report.sections.draws import draws_section
from torchbayes.report.sections.examples import examples_section
from torchbayes.report.sections.headline import headline
from torchbayes.report.sections.intervals import intervals_section
from torchbayes.report.sections.notices import notices_section
from torchbayes.report.sections.shift import shift_section
from torchbayes.report.sections.training import training_section
from torchbayes.report.sections.unfamiliar import unfamiliar_section
from torchbayes.report.tables import latex_table, markdown_table
from torchbayes.report.wording import count, whole

__all__ = ["SECTIONS", "render_page", "write_report"]

SECTIONS: tuple[Callable[[Results], Section | None], ...] = (
    notices_section, comparison_section, failed_section, calibration_section, intervals_section,
    unfamiliar_section, shift_section, abstaining_section, afterwards_section, examples_section,
    draws_section, training_section, inside_section, settings_section, glossary_section,
)  # fmt: skip
"""The page from top to bottom. A section with nothing to show returns None and is left out."""


def write_report(folder: str | Path) -> Path:
    """Write the HTML report of a comparison, with its table as `table.md` and `table.tex` beside it.

    The page is a single file: styles, figures and pictures are embedded, and it loads nothing.

    Args:
        folder: Folder written by `torchbayes compare`, with `results.json`.

    Returns:
        The path of `report.html` in that folder.

    Raises:
        ValueError: If `results.json` is missing, damaged or not the result of a comparison.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "results.json").write_text('{"data": "digits", "methods": {"map": {"nll": 1}}}')
        >>> write_report(folder).name
        'report.html'
    """
    path, results = Path(folder) / "report.html", load_results(folder)
    write_text(path.with_name("table.md"), markdown_table(results))
    write_text(path.with_name("table.tex"), latex_table(results))
    write_text(path, render_page(results))
    return path


def render_page(results: Results) -> str:
    """Return the page as HTML.

    Args:
        results: Results from `load_results`.
    """
    found = (make(results) for make in SECTIONS)
    script = read_asset("script.js")
    # The page may run only this script and may load nothing, so even a class name that got past the
    # escaping could do no harm.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    sizes = {scored.value for scored in results.scored("parameters")}
    return render(
        "page.html.j2",
        results=results,
        headline=headline(results),
        some=any(not method.first for method in results.methods),
        shown=count(SHOWN, "method").split()[0],
        sections=[section for section in found if section is not None],
        created=_date(results.created),
        parameters=whole(sizes.pop()) if len(sizes) == 1 else "",
        style=Markup(read_asset("style.css")),
        script=Markup(script),
        script_digest=digest,
    )


def _date(iso: str) -> str:
    """Format an ISO time for readers; return anything else unchanged."""
    try:
        moment = datetime.fromisoformat(iso.replace("Z", "+00:00"))
    except ValueError:
        return iso
    return f"{moment.day} {moment:%B %Y, %H:%M %Z}".rstrip()
