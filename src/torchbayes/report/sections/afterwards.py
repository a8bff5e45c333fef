"""Before and after: temperature scaling, prediction sets and abstention."""

from __future__ import annotations

from collections.abc import Sequence

from torchbayes.report.extras import Calibration, Numbers
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.wording import fixed, percent

__all__ = ["afterwards_section"]


def afterwards_section(results: Results) -> Section | None:
    """Tables of what `torchbayes calibrate` found, for the first run of each method that has it."""
    found: list[tuple[MethodResult, Calibration]] = []
    for method in results.methods:
        one = next((r.extras.calibration for r in method.runs if r.extras.calibration), None)
        if one is not None:
            found.append((method, one))
    if not found:
        return None
    body = render(
        "afterwards.html.j2",
        fitted_on=found[0][1].fitted_on,
        scored_on=found[0][1].scored_on,
        scaled=[
            (m, fixed(c.temperature, 2), [_pair(c, "nll", 4), _pair(c, "ece", 4)]) for m, c in found
        ],
        coverages=_targets([c.conformal for _, c in found]),
        sets=[(m, [_set(row) for row in c.conformal]) for m, c in found if c.conformal],
        risks=_targets([c.abstention for _, c in found]),
        refusals=[(m, [_refusal(row) for row in c.abstention]) for m, c in found if c.abstention],
    )
    return Section("afterwards", "Afterwards", "What can be put right afterwards?", body)


def _pair(calibration: Calibration, key: str, digits: int) -> tuple[str, str, bool]:
    """A score before and after, and whether it got better."""
    before, after = calibration.before.get(key), calibration.after.get(key)
    if before is None or after is None:
        return "–", "–", False
    return fixed(before, digits), fixed(after, digits), after < before


def _targets(rows: Sequence[Sequence[Numbers]]) -> list[str]:
    longest = max(rows, key=len)
    return [f"{100 * row.get('target', 0):g} %" for row in longest]


def _set(row: Numbers) -> tuple[str, str]:
    size = fixed(row["mean_size"], 2) if "mean_size" in row else "–"
    return (percent(row["coverage"]) if "coverage" in row else "–"), f"{size} classes"


def _refusal(row: Numbers) -> tuple[str, str]:
    risk = percent(row["risk"], 2) if "risk" in row else "–"
    return risk, f"{percent(row['coverage'], 0) if 'coverage' in row else '–'} answered"
