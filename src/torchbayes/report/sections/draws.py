"""NLL and accuracy against the number of posterior draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup

from torchbayes.report.charts import Course, Line, line_chart, mean_course, score_axis
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Axis
from torchbayes.report.wording import count, percent, significant

__all__ = ["draws_section"]

_CLOSE = 0.02


def draws_section(results: Results) -> Section | None:
    """Show what further draws add and how many are enough."""
    keys = ("draws", "nll", "accuracy")
    courses = [
        (m, mean_course([run.extras.draws for run in m.runs], keys)) for m in results.methods
    ]
    found = [(method, course) for method, course in courses if course is not None]
    if not found:
        return None
    body = render(
        "draws.html.j2",
        methods=[method for method, _ in found],
        charts=[
            _chart(found, "nll", "NLL, lower is better", significant),
            _chart(found, "accuracy", "accuracy", percent),
        ],
        enough=[(method, _enough(course)) for method, course in found],
        most=count(int(max(course["draws"][-1] for _, course in found)), "draw"),
    )
    return Section("draws", "Draws", "How many draws are enough?", body)


def _enough(course: Course) -> int:
    """Return the number of draws from which on the NLL stays close to its final value."""
    final = course["nll"][-1]
    far = np.flatnonzero(np.abs(course["nll"] - final) > _CLOSE * abs(final))
    return int(course["draws"][0 if len(far) == 0 else far[-1] + 1])


def _chart(
    found: Sequence[tuple[MethodResult, Course]], key: str, label: str, show: Callable[[float], str]
) -> Markup:
    lines = []
    for method, course in found:
        first, last = show(float(course[key][0])), show(float(course[key][-1]))
        hint = f"{method.name}: {first} with one draw, {last} with {int(course['draws'][-1])}"
        lines.append(Line(method, course["draws"], course[key], hint))
    most = max(float(line.x[-1]) for line in lines)
    ticks = [float(2**power) for power in range(int(np.log2(most)) + 1)]
    return line_chart(
        lines,
        Axis(1, most, "draws averaged", ticks, transform=np.log10),
        score_axis(lines, label, share=key == "accuracy"),
        f"{label} against the number of draws; {'; '.join(line.hint for line in lines)}.",
        width=600,
    )
