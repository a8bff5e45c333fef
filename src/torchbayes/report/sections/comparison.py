"""The table: quality, uncertainty, unfamiliar inputs and cost of every method, side by side."""

from __future__ import annotations

from itertools import groupby

from torchbayes.report.columns import cell_of, columns_with_data, group_name
from torchbayes.report.fragment import Section, render
from torchbayes.report.ranking import RULE, SHOWN
from torchbayes.report.results import Results
from torchbayes.report.sections.cost import cost_chart
from torchbayes.report.wording import count

__all__ = ["comparison_section"]


def comparison_section(results: Results) -> Section | None:
    """Show the table, the methods, quality against cost, and every run."""
    if not results.methods:
        return None
    columns = columns_with_data(results.methods, main=True)
    body = render(
        "comparison.html.j2",
        results=results,
        columns=columns,
        groups=[
            (group_name(name, results), len(list(group)))
            for name, group in groupby(columns, lambda c: c.group)
        ],
        some=any(not method.first for method in results.methods),
        rule=RULE,
        shown=count(SHOWN, "method"),
        rows=[(m, [cell_of(c, m, results) for c in columns]) for m in results.methods],
        seeds=max(len(method.runs) for method in results.methods),
        cost=cost_chart(results),
        run_columns=columns_with_data(results.methods, main=False),
    )
    title = "Side by side" if len(results.methods) > 1 else "The scores"
    return Section("comparison", "Table", title, body)
