"""The table as Markdown and LaTeX."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torchbayes.report import latex_table, load_results, markdown_table, write_report

from .folders import write_folder

NASTY = r"a_b & 50% #1 $x$ {y} ~^ \input{z} <i> |"


def test_latex_is_booktabs(tmp_path: Path) -> None:
    methods = {"map": {"skill": 1.5}, "bbb": {"skill": 3.0}}
    results = load_results(write_folder(tmp_path, methods, seeds=(0, 1)))
    lines = latex_table(results).splitlines()
    assert lines[2] == r"\toprule"
    assert lines[4] == r"\midrule"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    columns = len(lines[3].split(" & "))
    assert lines[1] == r"\begin{tabular}{l" + "r" * (columns - 1) + "}"
    assert r"NLL $\downarrow$" in lines[3]
    for line in lines[5:7]:
        assert len(line.split(" & ")) == columns
        assert line.endswith(r" \\")
    nll = {m.name: (m.scores["nll"], m.spread["nll"]) for m in results.methods}
    assert rf"\textbf{{{nll['bbb'][0]:.4f}}} $\pm$ {nll['bbb'][1]:.4f}" in lines[5]


def test_names_are_escaped(tmp_path: Path) -> None:
    text = latex_table(load_results(write_folder(tmp_path, {NASTY[:9]: {}, NASTY[9:]: {}})))
    body = "\n".join(text.splitlines()[5:7])
    for sign in "_%#":
        assert not re.search(rf"(?<!\\){sign}", body)
    assert r"\textbackslash{}input\{z\}" in body
    assert r"\$x\$" in body


def test_names_with_links_lines_and_escapes(tmp_path: Path) -> None:
    names = ["![](http://e/x.png)", "[l](javascript:alert(1))", "\x1b]0;a\x07\nb\\|`c`", "*d"]
    results = load_results(write_folder(tmp_path, {name: {} for name in names}))
    shown, latex = markdown_table(results), latex_table(results)
    for text in (shown, latex):
        assert text.replace("\n", "").isprintable()
        assert len(text.splitlines()) == len(text.split("\n")) - 1
    assert r"!\[\](http://e/x.png)" in shown
    assert r"\[l\](javascript" in shown
    assert r"\\x1b\]0;a\\x07 b\\\|\`c\`" in shown
    assert "{[}l{]}(javascript" in latex
    assert not re.search(r"\\\\\s*[*\[]", latex), "an argument of the line break before it"
    assert not re.search(r"^[*\[]", latex, re.MULTILINE)


def test_values_level_with_the_best_are_marked(tmp_path: Path) -> None:
    methods = {"map": {"skill": 2.0}, "mle": {"skill": 2.0}}
    results = load_results(write_folder(tmp_path, methods, seeds=(0, 1, 2)))
    assert r"\underline{" in latex_table(results)
    assert re.search(r"\| \*[\d.]+", markdown_table(results))


def test_both_lie_beside_the_page(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}, "mle": {}})
    write_report(tmp_path)
    results = load_results(tmp_path)
    assert (tmp_path / "table.md").read_text() == markdown_table(results)
    assert (tmp_path / "table.tex").read_text() == latex_table(results)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX on this machine")
def test_latex_takes_it(tmp_path: Path) -> None:
    results = load_results(write_folder(tmp_path, {NASTY[:9]: {}, NASTY[9:]: {}}))
    head = (
        "\\documentclass{article}\\usepackage[T1]{fontenc}\\usepackage{booktabs}\\begin{document}\n"
    )
    (tmp_path / "t.tex").write_text(head + latex_table(results) + "\\end{document}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
