"""Fill the documentation with what the library knows of its methods: menu, table, papers and options.

mkdocs.yml names this file as a hook, which completes pages, and as an extension of the docstring parser. A
new method needs only its page, `docs/methods/NAME.md`: the idea and the formula, when to use it, both ways to
use it, the settings that matter, its cost and what goes wrong. What was measured comes from `results/`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe

from torchbayes.train.method import arguments_of
from torchbayes.train.registry import METHODS, Option, method_options

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

__all__ = ["DoctestSections", "measured", "method_sections", "methods_menu", "methods_table"]

_NETWORKS = {"mlp": "MLP", "lenet5": "LeNet-5", "resnet20": "ResNet-20", "resnet18": "ResNet-18"}
_SECTIONS = """\
## Source

{paper}. Available as `tb.fit(…, method="{name}")`, `torchbayes train --method {name}` and the class below.

## Measured

{measured}
## Settings

`fit` takes the arguments of this class as options; `torchbayes methods {name}` lists them.

::: {path}
    options: {{ members: false }}
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the Methods section of the menu."""
    for entry in config.nav or []:
        if "Methods" in entry:
            entry["Methods"] = methods_menu(Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, /, *, page: Page, **others: Any) -> str:
    """Complete the pages in docs/methods."""
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder != "methods":
        return markdown
    return f"{markdown}\n{methods_table() if name == 'index' else method_sections(name)}"


def methods_menu(docs: Path) -> list[str]:
    """Return the pages of the Methods section: the table, then one page per method, by name."""
    pages = sorted(path.name for path in (docs / "methods").glob("*.md"))
    return [f"methods/{name}" for name in sorted(pages, key=lambda name: name != "index.md")]


def methods_table() -> str:
    """Return the table of all methods, as Markdown."""
    rows = [[f"[`{n}`]({n}.md)", method.summary, method.paper] for n, method in METHODS.items()]
    return _table("method", "what it is", "paper", rows=rows)


def method_sections(name: str) -> str:
    """Return the sections that end a method's page: its source, its measurements and its settings."""
    method = METHODS[name]
    path = f"{method.algorithm.__module__}.{method.algorithm.__name__}"
    text = _SECTIONS.format(name=name, paper=method.paper, path=path, measured=measured(name))
    # A declaration may change a default of the class.
    documented = arguments_of(method.algorithm).keys() - method.defaults.keys()
    others = [o for o in method_options(method).values() if o.name not in documented]
    if not others:
        return text
    rows = [[f"`{o.name}`", f"`{_default(o)}`", o.meaning] for o in others]
    table = _table("option", "default", "meaning", rows=rows)
    return f"{text}\n`fit` also takes these options:\n\n{table}"


def measured(name: str) -> str:
    """Return what `results/` has on a method: its steps, its storage and its row of the digits demo."""
    parts = [*_steps(name), *_demo(name)]
    if not parts:
        parts = ["The benchmarks and the record of the digits demo do not have this method yet.\n"]
    return "\n".join(parts)


def _steps(name: str) -> Iterator[str]:
    found = _read("benchmarks.json").get("networks", {})
    steps = {n: s["steps"][name] for n, s in found.items() if name in s["steps"]}
    if not steps:
        return
    plain = {step["to"] for step in steps.values()}
    rows = [["one step", *(f"{step['ratio']:.2f}" for step in steps.values())]]
    if all("memory" in step for step in steps.values()):
        rows.append(["its peak memory", *(f"{step['memory']:.2f}" for step in steps.values())])
    yield (
        f"Relative to plain {' or '.join(sorted(plain))} (`make bench`; [all methods, with quartiles]"
        "(../benchmarks.md)):\n"
    )
    yield _table("", *(_NETWORKS.get(network, network) for network in steps), rows=rows)


def _demo(name: str) -> Iterator[str]:
    record = _read("demo/digits.json")
    rows: dict[str, Any] = record.get("rows", {})
    if name not in rows:
        return
    shown = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "auroc_ood": "AUROC, unfamiliar"}
    ratio = rows[name]["stored"]["mean"] / rows[name]["parameters"]["mean"]
    yield (
        f"On the [digits demo](../results/demo.md#the-digits-demo), where its posterior stores {ratio:.1f} "
        f"numbers per weight (`{record['command']}`; means over {len(record['seeds'])} seeds):\n"
    )
    names = list(dict.fromkeys([name, "map"]))
    lines = [[n, *(f"{rows[n][key]['mean']:.4f}" for key in shown)] for n in names if n in rows]
    yield _table("", *shown.values(), rows=lines)


@functools.cache
def _read(file: str) -> dict[str, Any]:
    """Return a record, or nothing if it has not been measured."""
    path = Path(__file__).parents[1] / "results" / file
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _default(option: Option) -> str:
    return getattr(option.default, "__name__", repr(option.default))


def _table(*columns: str, rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [[*columns], ["---"] * len(columns), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class DoctestSections(griffe.Extension):
    """Show the examples in docstrings as code.

    griffe knows the heading `Examples:` only; it takes our `Example:` for a note written in Markdown, where
    `>>>` is a quotation and `[0]["lr"]` a link.
    """

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        """Rename the heading."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
