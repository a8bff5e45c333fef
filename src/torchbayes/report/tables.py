"""The table of a comparison as Markdown and LaTeX, to paste into a README or a paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchbayes.report.columns import columns_with_data
from torchbayes.report.results import Results
from torchbayes.report.sections.cells import Cell, cell_of

__all__ = ["latex_table", "markdown_table"]


def markdown_table(results: Results) -> str:
    """The table as Markdown: the best values are bold, those level with them italic.

    Args:
        results: What `load_results` read.
    """
    head, rows = _texts(results, lambda cell: _marked(cell, "**{}**", "*{}*"))
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "".join("| " + " | ".join(_markdown(cell) for cell in line) + " |\n" for line in lines)


def latex_table(results: Results) -> str:
    r"""The table as LaTeX for the booktabs package: the best values are bold, those level underlined.

    Args:
        results: What `load_results` read.

    Returns:
        A `tabular` environment. Names are escaped; arrows are `$\uparrow$` and `$\downarrow$`.
    """

    def shown(cell: Cell) -> str:
        value = _latex(cell.text)
        if cell.best:
            value = rf"\textbf{{{value}}}"
        elif cell.level:
            value = rf"\underline{{{value}}}"
        return f"{value} $\\pm$ {_latex(cell.spread)}" if cell.spread else value

    columns = columns_with_data(results.methods, main=True)
    arrows = {"↑": r" $\uparrow$", "↓": r" $\downarrow$", "": ""}
    head = ["Method", *(_latex(c.label) + arrows[c.arrow] for c in columns)]
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
    ]
    for method in results.methods:
        cells = [shown(cell_of(column, method, results)) for column in columns]
        lines.append(" & ".join([_latex(method.name), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _texts(results: Results, show: Callable[[Cell], str]) -> tuple[list[str], Iterator[list[str]]]:
    columns = columns_with_data(results.methods, main=True)
    head = ["method", *(f"{c.label} {c.arrow}".strip() for c in columns)]
    rows = ([m.name, *(show(cell_of(c, m, results)) for c in columns)] for m in results.methods)
    return head, rows


def _marked(cell: Cell, best: str, level: str) -> str:
    text = f"{cell.text} ± {cell.spread}" if cell.spread else cell.text
    return best.format(text) if cell.best else level.format(text) if cell.level else text


def _markdown(text: str) -> str:
    """Text that cannot end a cell of a Markdown table or start an element."""
    text = " ".join(text.split()).replace("\u202f", " ")
    for sign, safe in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|")):
        text = text.replace(sign, safe)
    return text


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%",
    "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "–": "--", "−": "$-$",
    "×": r"$\times$", "\u202f": r"\,",
}  # fmt: skip


def _latex(text: str) -> str:
    """Text in which no character is a command of LaTeX."""
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split(" ")))
