"""Pictures that methods and commands leave in their run folders."""

from __future__ import annotations

from torchbayes.report.fragment import Section, render
from torchbayes.report.results import Results

__all__ = ["inside_section"]


def inside_section(results: Results) -> Section | None:
    """Signal-to-noise ratios, landscapes, traces and the like, where a run has them."""
    found = [
        (method, run, picture)
        for method in results.methods
        for run in method.runs
        for picture in run.extras.pictures
    ]
    if not found:
        return None
    body = render("inside.html.j2", pictures=found)
    return Section("inside", "Inside", "A look inside the methods", body)
