"""Temperature scaling, prediction sets, abstention and intervals, before and after."""

from __future__ import annotations

from collections.abc import Sequence

from torchbayes.report.extras import Calibration, Numbers
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import percent_tick
from torchbayes.report.wording import fixed, percent, whole

__all__ = ["afterwards_section"]


_INTERVALS = {"own": "the posterior's own", "residual": "residual", "quantile": "quantile (CQR)"}


def afterwards_section(results: Results) -> Section | None:
    """Tabulate the results of `torchbayes calibrate` for the first run of each method that has them."""
    found: dict[MethodResult, Calibration] = {}
    for method in results.methods:
        for run in method.runs:
            if run.extras.calibration is not None:
                found.setdefault(method, run.extras.calibration)
    if not found:
        return None
    first = next(iter(found.values()))
    kinds = list(dict.fromkeys(kind for c in found.values() for kind in c.intervals))
    body = render(
        "afterwards.html.j2",
        fitted_on=first.fitted_on,
        scored_on=first.scored_on,
        scaled=[
            (m, fixed(c.temperature, 2), [_pair(c, "nll"), _pair(c, "ece")])
            for m, c in found.items()
            if c.temperature is not None
        ],
        coverages=_targets([c.conformal for c in found.values()]),
        sets=[(m, [_set(row) for row in c.conformal]) for m, c in found.items() if c.conformal],
        risks=_targets([c.abstention for c in found.values()]),
        shares=_targets([rows for c in found.values() for rows in c.intervals.values()] or [()]),
        kinds=[_INTERVALS.get(kind, kind) for kind in kinds],
        intervals=[
            (m, [[_interval(row) for row in c.intervals.get(kind, ())] for kind in kinds])
            for m, c in found.items()
            if c.intervals
        ],
        refusals=[
            (m, [_refusal(r) for r in c.abstention]) for m, c in found.items() if c.abstention
        ],
    )
    return Section("afterwards", "Fixes", "What can be fixed after training?", body)


def _pair(calibration: Calibration, key: str) -> tuple[str, str, bool]:
    """Return a score before and after, and whether it improved."""
    before, after = calibration.before.get(key), calibration.after.get(key)
    if before is None or after is None:
        return "–", "–", False
    return fixed(before, 4), fixed(after, 4), after < before


def _targets(rows: Sequence[Sequence[Numbers]]) -> list[str]:
    return [percent_tick(row.get("target", 0)) for row in max(rows, key=len)]


def _interval(row: Numbers) -> tuple[str, str]:
    size = "unbounded"
    if "width" in row:
        width = row["width"]
        size = f"{whole(width) if width >= 1000 else format(width, '.3g')} wide"
    return (percent(row["coverage"]) if "coverage" in row else "–"), size


def _set(row: Numbers) -> tuple[str, str]:
    size = fixed(row["mean_size"], 2) if "mean_size" in row else "–"
    return (percent(row["coverage"]) if "coverage" in row else "–"), f"{size} classes"


def _refusal(row: Numbers) -> tuple[str, str]:
    risk = percent(row["risk"], 2) if "risk" in row else "–"
    return risk, f"{percent(row['coverage'], 0) if 'coverage' in row else '–'} answered"
