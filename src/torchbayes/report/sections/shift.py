"""Robustness: accuracy, NLL and calibration on damaged test images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from markupsafe import Markup

from torchbayes.data.corruptions import CORRUPTIONS, corrupt
from torchbayes.report.charts import Line, line_chart, score_axis
from torchbayes.report.fragment import Section, render
from torchbayes.report.pictures import data_uri
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Array, Axis
from torchbayes.report.wording import fixed, percent, significant

__all__ = ["shift_section"]

_SCORES = {"accuracy": "accuracy", "nll": "NLL, lower is better", "ece": "ECE, lower is better"}
_SHOWN = (1, 3, 5)

Course = dict[str, Array]
"""Scores by severity, the undamaged images first."""


def shift_section(results: Results) -> Section | None:
    """Scores against severity, over all kinds of damage and for each."""
    found = [(m, kinds) for m in results.methods if (kinds := _kinds(m))]
    if not found:
        return None
    average = [(method, _mean(list(kinds.values()))) for method, kinds in found]
    names = list(dict.fromkeys(kind for _, kinds in found for kind in kinds))
    body = render(
        "shift.html.j2",
        methods=[method for method, _ in found],
        charts=[_chart(average, key, label) for key, label in _SCORES.items()],
        kinds=[
            (
                kind,
                _pictures(results, kind),
                _chart(
                    [(m, kinds[kind]) for m, kinds in found if kind in kinds],
                    "accuracy",
                    f"accuracy under {kind}",
                ),
            )
            for kind in names
        ],
        rows=[
            (
                method,
                [
                    percent(float(course["accuracy"][0])),
                    percent(float(course["accuracy"][-1])),
                    fixed(float(course["ece"][0]), 3),
                    fixed(float(course["ece"][-1]), 3),
                ],
            )
            for method, course in average
        ],
        best=max(average, key=lambda pair: float(pair[1]["accuracy"][-1]))[0],
        calm=min(average, key=lambda pair: float(pair[1]["ece"][-1]))[0],
        note=next(run.extras.corruption_note for run in found[0][0].runs if run.extras.corruptions),
    )
    return Section("shift", "Damage", "What if the inputs are damaged?", body)


def _kinds(method: MethodResult) -> dict[str, Course]:
    """A course for each kind of damage, averaged over runs."""
    courses: dict[str, list[Course]] = {}
    for run in method.runs:
        for kind, rows in run.extras.corruptions.items():
            if len(rows) > 1 and all(key in row for row in rows for key in _SCORES):
                keys = ("severity", *_SCORES)
                course = {key: np.asarray([row[key] for row in rows]) for key in keys}
                courses.setdefault(kind, []).append(course)
    return {kind: _mean(several) for kind, several in courses.items()}


def _mean(courses: Sequence[Course]) -> Course:
    length = min(len(course["severity"]) for course in courses)
    return {
        key: np.mean([course[key][:length] for course in courses], axis=0) for key in courses[0]
    }


def _chart(found: Sequence[tuple[MethodResult, Course]], key: str, label: str) -> Markup:
    share = key == "accuracy"
    show = percent if share else significant
    lines = [
        Line(
            method,
            course["severity"],
            course[key],
            f"{method.name}: {show(float(course[key][0]))} undamaged, "
            f"{show(float(course[key][-1]))} at the worst",
        )
        for method, course in found
    ]
    last = max(float(line.x[-1]) for line in lines)
    return line_chart(
        lines,
        Axis(0, last, "severity", list(range(int(last) + 1)), lambda v: f"{v:g}" if v else "none"),
        score_axis(lines, label, share=share, from_zero=not share),
        f"{label} against the severity of damage; {'; '.join(line.hint for line in lines)}.",
        width=380,
    )


def _pictures(results: Results, kind: str) -> list[tuple[str, str]]:
    """What the damage looks like: pictures and what they show."""
    images = results.images
    if images is None or kind not in CORRUPTIONS or len(images.test) == 0:
        return []
    first = torch.as_tensor(images.test[:1])
    if first.is_floating_point() and not (0 <= float(first.min()) <= float(first.max()) <= 1):
        return []
    limits = (0.0, 1.0) if first.is_floating_point() else (0.0, 255.0)
    return [
        (
            data_uri(corrupt(first, kind, severity)[0].numpy(), limits),
            f"A test image with {kind} of severity {severity}",
        )
        for severity in _SHOWN
    ]
