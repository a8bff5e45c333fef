"""Risk–coverage curves: the gain from not answering where the method is least sure."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from torchbayes import metrics
from torchbayes.report.charts import Line, line_chart, span
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Axis, linear_ticks, percent_tick
from torchbayes.report.wording import percent

__all__ = ["abstaining_section"]

_COVERAGES = (1.0, 0.95, 0.9, 0.8)


def abstaining_section(results: Results) -> Section | None:
    """Plot the error rate among the answers against the share of inputs answered."""
    curves = [
        (method, metrics.risk_coverage(p.test.confidence, p.test.prediction == p.targets))
        for method, p in results.predicted
    ]
    if not curves:
        return None
    rows = [(m, [_risk_at(curve, coverage) for coverage in _COVERAGES]) for m, curve in curves]
    body = render(
        "abstaining.html.j2",
        chart=_chart(curves),
        rows=[(method, [percent(risk, 2) for risk in risks]) for method, risks in rows],
        coverages=[percent(coverage, 0) for coverage in _COVERAGES],
        best=rows[int(np.argmin([float(curve.risk.mean()) for _, curve in curves]))],
        percent=percent,
    )
    return Section("abstaining", "Abstaining", "What if it may say “I don’t know”?", body)


def _risk_at(curve: metrics.RiskCoverage, coverage: float) -> float:
    answered = max(1, round(coverage * len(curve.risk)))
    return float(curve.risk[answered - 1])


def _chart(curves: list[tuple[MethodResult, metrics.RiskCoverage]]) -> Markup:
    pairs = [(curve.coverage.numpy(), curve.risk.numpy()) for _, curve in curves]
    # Start a little before the first error, past the points that rest on few answers.
    first = min(float(x[y > 0].min(initial=0.8)) for x, y in pairs)
    start = max(0.05, math.floor(first * 10 - 0.5) / 10)
    lines = []
    for (method, curve), (x, y) in zip(curves, pairs, strict=True):
        full, part = percent(_risk_at(curve, 1.0)), percent(_risk_at(curve, 0.9))
        hint = f"{method.name}: {full} errors, {part} when 10 % are declined"
        lines.append(Line(method, x[x >= start], y[x >= start], hint))
    top = span(lines)[1]
    top = top * 1.08 if top > 0 else 0.01
    return line_chart(
        lines,
        Axis(start, 1, "share of inputs answered", linear_ticks(start, 1), percent_tick),
        Axis(0, top, "errors among the answers", linear_ticks(0, top), percent_tick),
        f"Risk–coverage curves; {'; '.join(line.hint for line in lines)}.",
        width=600,
    )
