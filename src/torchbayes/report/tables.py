"""The table of a comparison as Markdown and LaTeX, for a README or a paper."""

from __future__ import annotations

import re

from torchbayes.report.columns import Cell, cell_of, columns_with_data, full_label
from torchbayes.report.results import Results

__all__ = ["latex_table", "markdown_table"]


def markdown_table(results: Results) -> str:
    """Return the table as Markdown: the best values are bold, those level with them italic.

    Args:
        results: Results from `load_results`.
    """

    def shown(cell: Cell) -> str:
        text = f"{cell.text} ± {cell.spread}" if cell.spread else cell.text
        return f"**{text}**" if cell.best else f"*{text}*" if cell.level else text

    columns = columns_with_data(results.methods, main=True)
    lines = [["method", *(f"{full_label(c, results)} {c.arrow}".strip() for c in columns)]]
    lines += [["---", *("---:" for _ in columns)]]
    lines += [[m.name, *(shown(cell_of(c, m, results)) for c in columns)] for m in results.methods]
    return "".join("| " + " | ".join(_markdown(cell) for cell in line) + " |\n" for line in lines)


def latex_table(results: Results) -> str:
    r"""Return the table as LaTeX for booktabs: the best values are bold, those level underlined.

    Args:
        results: Results from `load_results`.

    Returns:
        A `tabular` environment with escaped names and `$\uparrow$` and `$\downarrow$` as arrows.
    """

    def shown(cell: Cell) -> str:
        style = r"\textbf{%s}" if cell.best else r"\underline{%s}" if cell.level else "%s"
        value = style % _latex(cell.text)
        return f"{value} $\\pm$ {_latex(cell.spread)}" if cell.spread else value

    columns = columns_with_data(results.methods, main=True)
    arrows = {"↑": r" $\uparrow$", "↓": r" $\downarrow$", "": ""}
    lines = [["Method", *(_latex(full_label(c, results)) + arrows[c.arrow] for c in columns)]]
    for m in results.methods:
        lines.append([_latex(m.name), *(shown(cell_of(c, m, results)) for c in columns)])
    head, *rows = (" & ".join(line) + r" \\" for line in lines)
    start = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
    ]
    return "\n".join([*start, head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", ""])


def _markdown(text: str) -> str:
    """Escape what could end a cell of a Markdown table or start an element, such as a picture or a link."""
    return _one_line(text).replace("\u202f", " ").translate(_MARKDOWN)


def _latex(text: str) -> str:
    """Escape every character that LaTeX would interpret."""
    return _one_line(text).translate(_LATEX)


def _one_line(text: str) -> str:
    """Return text on one line; what could steer a terminal becomes an escape sequence that is only shown."""
    line = " ".join(re.split(r"[^\S\u202f]+", text.strip()))
    return "".join(
        c if c.isprintable() or c == "\u202f" else c.encode("unicode_escape").decode() for c in line
    )


_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;", **{c: f"\\{c}" for c in "\\`[]|"}})
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%",
    "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "–": "--", "−": "$-$",
    "×": r"$\times$", "[": "{[}", "]": "{]}", "*": "{*}", "\u202f": r"\,",
})  # fmt: skip
