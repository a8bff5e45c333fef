"""Robustness: accuracy, NLL and calibration on damaged test images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from markupsafe import Markup

from torchbayes.data.corruptions import CORRUPTIONS, corrupt
from torchbayes.report.charts import Course, Line, line_chart, mean_course, score_axis
from torchbayes.report.fragment import Section, render
from torchbayes.report.pictures import data_uri
from torchbayes.report.results import MethodResult, Results, Row
from torchbayes.report.svg import Axis
from torchbayes.report.wording import fixed, percent, significant

__all__ = ["shift_section"]

_SCORES = {"accuracy": "accuracy", "nll": "NLL, lower is better", "ece": "ECE, lower is better"}
_SHOWN = (1, 3, 5)


def shift_section(results: Results) -> Section | None:
    """Plot scores against severity, over all kinds of damage and for each."""
    found = [(m, kinds) for m in results.methods if (kinds := _kinds(m))]
    if not found:
        return None
    average = [(method, _mean(list(kinds.values()))) for method, kinds in found]
    charts = []
    for kind in dict.fromkeys(kind for _, kinds in found for kind in kinds):
        courses = [(m, kinds[kind]) for m, kinds in found if kind in kinds]
        chart = _chart(courses, "accuracy", f"accuracy under {kind}")
        charts.append((kind, _pictures(results, kind), chart))
    rows = []
    for method, course in average:
        accuracy = [percent(float(course["accuracy"][at])) for at in (0, -1)]
        rows.append((method, accuracy + [fixed(float(course["ece"][at]), 3) for at in (0, -1)]))
    body = render(
        "shift.html.j2",
        methods=[method for method, _ in found],
        charts=[_chart(average, key, label) for key, label in _SCORES.items()],
        kinds=charts,
        rows=rows,
        best=max(average, key=lambda pair: float(pair[1]["accuracy"][-1]))[0],
        calm=min(average, key=lambda pair: float(pair[1]["ece"][-1]))[0],
        note=next(run.extras.corruption_note for run in found[0][0].runs if run.extras.corruptions),
    )
    return Section("shift", "Damage", "What if the inputs are damaged?", body)


def _kinds(method: MethodResult) -> dict[str, Course]:
    """Return scores by severity for each kind of damage, averaged over runs."""
    rows: dict[str, list[Sequence[Row]]] = {}
    for run in method.runs:
        for kind, scores in run.extras.corruptions.items():
            rows.setdefault(kind, []).append(scores)
    courses = {kind: mean_course(runs, ("severity", *_SCORES)) for kind, runs in rows.items()}
    return {kind: course for kind, course in courses.items() if course is not None}


def _mean(courses: Sequence[Course]) -> Course:
    end = min(len(course["severity"]) for course in courses)
    return {key: np.mean([c[key][:end] for c in courses], axis=0) for key in courses[0]}


def _chart(found: Sequence[tuple[MethodResult, Course]], key: str, label: str) -> Markup:
    share = key == "accuracy"
    show = percent if share else significant
    lines = []
    for method, course in found:
        clean, worst = show(float(course[key][0])), show(float(course[key][-1]))
        hint = f"{method.name}: {clean} undamaged, {worst} at the highest severity"
        lines.append(Line(method, course["severity"], course[key], hint))
    last = max(float(line.x[-1]) for line in lines)
    return line_chart(
        lines,
        Axis(0, last, "severity", list(range(int(last) + 1)), lambda v: f"{v:g}" if v else "none"),
        score_axis(lines, label, share=share, from_zero=not share),
        f"{label} against the severity of the damage; {'; '.join(line.hint for line in lines)}.",
        width=380,
    )


def _pictures(results: Results, kind: str) -> list[tuple[str, str]]:
    """Return example pictures of a kind of damage, with their descriptions."""
    images = results.images
    if images is None or kind not in CORRUPTIONS or len(images.test) == 0:
        return []
    first = torch.as_tensor(images.test[:1])
    high = 1.0 if first.is_floating_point() else 255.0
    if not 0 <= float(first.min()) <= float(first.max()) <= high:
        return []
    return [
        (
            data_uri(corrupt(first, kind, severity)[0].numpy(), (0.0, high)),
            f"A test image with {kind} of severity {severity}",
        )
        for severity in _SHOWN
    ]
