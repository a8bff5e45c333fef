"""Risk–coverage curves: what is gained by not answering where the method is least sure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from torchbayes import metrics
from torchbayes.report.charts import Line, line_chart
from torchbayes.report.fragment import Section, render
from torchbayes.report.results import MethodResult, Results
from torchbayes.report.svg import Axis, linear_ticks
from torchbayes.report.wording import percent

__all__ = ["abstaining_section"]

_COVERAGES = (1.0, 0.95, 0.9, 0.8)


def abstaining_section(results: Results) -> Section | None:
    """Error rate among the answers against the share of inputs that get one."""
    curves = [
        (
            method,
            metrics.risk_coverage(p.test.confidence, p.test.prediction == p.targets),
        )
        for method, p in results.predicted
    ]
    if not curves:
        return None
    rows = [
        (method, [_risk_at(curve, coverage) for coverage in _COVERAGES]) for method, curve in curves
    ]
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
    lines, ends = [], []
    for method, curve in curves:
        full, part = _risk_at(curve, 1.0), _risk_at(curve, 0.9)
        hint = f"{method.name}: {percent(full)} errors, {percent(part)} when 10 % are refused"
        ends.append(hint)
        lines.append(Line(method, curve.coverage.numpy(), curve.risk.numpy(), hint))
    start = _start(lines)
    lines = [_from(line, start) for line in lines]
    top = max(float(line.y.max()) for line in lines)
    top = top * 1.08 if top > 0 else 0.01
    return line_chart(
        lines,
        Axis(start, 1, "share of inputs answered", linear_ticks(start, 1), _share),
        Axis(0, top, "errors among the answers", linear_ticks(0, top), _share),
        f"Risk–coverage curves; {'; '.join(ends)}.",
        width=500,
    )


def _start(lines: Sequence[Line]) -> float:
    """Where to begin: a little before the first error, past the points that rest on few answers."""
    first = min(float(line.x[line.y > 0].min(initial=0.8)) for line in lines)
    return max(0.05, math.floor(first * 10 - 0.5) / 10)


def _from(line: Line, start: float) -> Line:
    keep = line.x >= start
    return dataclasses.replace(line, x=line.x[keep], y=line.y[keep])


def _share(value: float) -> str:
    return f"{np.round(100 * value, 4):g} %"
