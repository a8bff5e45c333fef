"""Failed methods, pictures of runs, settings and the glossary."""

from __future__ import annotations

import json
import shlex
from typing import Any

from torchbayes.report.columns import columns_with_data
from torchbayes.report.fragment import Section, glossary, render
from torchbayes.report.results import Results

# Terms that a page about numbers does not use.
_OF_CLASSES = ("Confidence", "Entropy", "Mutual information", "Over-confident")

__all__ = ["failed_section", "glossary_section", "inside_section", "settings_section"]


def failed_section(results: Results) -> Section | None:
    """List the methods that failed, each with its reason."""
    if not results.failed:
        return None
    finished = {method.name for method in results.methods}
    body = render("failed.html.j2", failed=results.failed, finished=finished)
    return Section("failed", "Failed", "What did not finish", body)


def inside_section(results: Results) -> Section | None:
    """Show the pictures in the run folders, such as signal-to-noise ratios and traces."""
    runs = [(method, run) for method in results.methods for run in method.runs]
    found = [(method, run, picture) for method, run in runs for picture in run.extras.pictures]
    if not found:
        return None
    body = render("inside.html.j2", pictures=found)
    return Section("inside", "Inside", "A look inside the methods", body)


def settings_section(results: Results) -> Section:
    """Show the data, the settings and the command."""
    given = results.settings.get("command")
    body = render(
        "settings.html.j2",
        results=results,
        exact=isinstance(given, str),
        command=given if isinstance(given, str) else _command(results),
        settings=[
            (key.replace("_", " "), _setting(value))
            for key, value in {"classes": list(results.classes), **results.settings}.items()
            if key != "command" and value is not None and value not in ("", [], {})
        ],
    )
    return Section("settings", "Settings", "How this was made", body)


def _command(results: Results) -> str:
    """Return a command with the same data, network, methods and budget."""
    names = [*(method.name for method in results.methods), *results.failed]
    settings = results.settings
    flags = {
        "data": settings.get("data", results.data),
        "model": settings.get("model", results.model),
        "methods": ",".join(dict.fromkeys(names)),
        **{key: settings.get(key) for key in ("epochs", "batch_size", "samples", "schedule")},
    }
    seeds = settings.get("seeds")
    if isinstance(seeds, list) and len(seeds) > 1:
        flags["seeds"] = len(seeds)
    words = ["torchbayes", "compare"]
    for key, value in flags.items():
        if value is not None and value != "":
            words += [f"--{key.replace('_', '-')}", str(value)]
    if settings.get("augment") is True:
        words.append("--augment")
    columns = settings.get("table")
    for key, value in columns.items() if isinstance(columns, dict) else ():
        for word in value if isinstance(value, (list, tuple)) else [value]:
            words += [f"--{key.replace('_', '-')}", str(word)]
    options = settings.get("model_options")
    for key, value in options.items() if isinstance(options, dict) else ():
        words += ["--model-set", f"{key}={json.dumps(value)}"]
    return shlex.join([*words, "--out", "OUT"])


def _setting(value: Any) -> str:
    """Format a setting."""
    if isinstance(value, list):
        return ", ".join(_setting(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        str(value)
        if isinstance(value, (str, int, float))
        else json.dumps(value, ensure_ascii=False)
    )


def glossary_section(results: Results) -> Section:
    """Explain every score of the table, then the terms of the page."""
    columns = columns_with_data(results.methods, main=False)
    numbers = bool(results.valued) and not results.predicted
    terms = {t: m for t, m in glossary()["terms"].items() if not (numbers and t in _OF_CLASSES)}
    body = render("glossary.html.j2", columns=columns, terms=terms)
    return Section("glossary", "Glossary", "What the terms mean", body, folded=True)
