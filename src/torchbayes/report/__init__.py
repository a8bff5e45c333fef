"""The report of a comparison: a single HTML page for screen and print that loads nothing else."""

from torchbayes.report.loading import load_results
from torchbayes.report.page import render_page, write_report
from torchbayes.report.results import MethodResult, Results, RunResult
from torchbayes.report.tables import latex_table, markdown_table

__all__ = [
    "MethodResult", "Results", "RunResult", "latex_table", "load_results", "markdown_table", "render_page",
    "write_report",
]  # fmt: skip
