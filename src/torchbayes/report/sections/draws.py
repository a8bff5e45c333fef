"""NLL and accuracy against the number of posterior draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup

from torchbayes.report.charts import Line, line_chart, score_axis
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Array, Axis
from torchbayes.report.wording import count, method_name, percent, significant

__all__ = ["draws_section"]

_CLOSE = 0.02


def draws_section(results: Results) -> Section | None:
    """What each further network adds, and how many are enough."""
    found = [(method, course) for method in results.methods if (course := _course(method))]
    if not found:
        return None
    enough = [
        Markup("{} {}").format(method_name(method), str(_enough(course)))
        for method, course in found
    ]
    body = render(
        "draws.html.j2",
        methods=[method for method, _ in found],
        charts=[
            _chart(found, "nll", "NLL, lower is better", significant),
            _chart(found, "accuracy", "accuracy", percent),
        ],
        enough=Markup(", ").join(enough),
        most=count(int(max(course["draws"][-1] for _, course in found)), "draw"),
    )
    return Section("draws", "Draws", "How many draws are enough?", body)


def _course(method: MethodResult) -> dict[str, Array] | None:
    """The course averaged over runs, if it has at least two points."""
    courses = [run.extras.draws for run in method.runs if len(run.extras.draws) > 1]
    keys = ("draws", "nll", "accuracy")
    courses = [c for c in courses if all(key in row for row in c for key in keys)]
    if not courses:
        return None
    length = min(len(course) for course in courses)
    return {
        key: np.mean([[row[key] for row in c[:length]] for c in courses], axis=0) for key in keys
    }


def _enough(course: dict[str, Array]) -> int:
    """The first number of draws from which on the NLL stays close to what all of them give."""
    final = course["nll"][-1]
    far = np.flatnonzero(np.abs(course["nll"] - final) > _CLOSE * abs(final))
    return int(course["draws"][0 if len(far) == 0 else far[-1] + 1])


def _chart(
    found: Sequence[tuple[MethodResult, dict[str, Array]]],
    key: str,
    label: str,
    show: Callable[[float], str],
) -> Markup:
    lines = [
        Line(
            method,
            course["draws"],
            course[key],
            f"{method.name}: {show(float(course[key][0]))} with one draw, "
            f"{show(float(course[key][-1]))} with {int(course['draws'][-1])}",
        )
        for method, course in found
    ]
    last = max(float(line.x[-1]) for line in lines)
    ticks = [float(2**power) for power in range(int(np.log2(last)) + 1)]
    return line_chart(
        lines,
        Axis(1, last, "draws averaged", ticks, "{:g}".format, np.log10),
        score_axis(lines, label, share=key == "accuracy"),
        f"{label} against the number of draws; {'; '.join(line.hint for line in lines)}.",
        width=500,
    )
