"""A folder for the Hugging Face Hub: a saved run and a model card, which says how to load it.

Nothing is uploaded, and nothing here needs huggingface_hub. Whatever a name contains, it is text on the card:
quoted in the metadata, escaped in the Markdown. Paths of this machine are left out of the settings.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torchbayes._version import __version__
from torchbayes.core.errors import RunError
from torchbayes.core.reading import read_json
from torchbayes.core.storage import write_text
from torchbayes.likelihood import Bernoulli, Categorical
from torchbayes.posterior import Point
from torchbayes.train.registry import METHODS
from torchbayes.train.run import Run, load_run
from torchbayes.train.run_folder import RunFolder

__all__ = ["export"]

# The scores that a reader knows; a classifier has some of them, a regression others.
_SCORES = {
    "accuracy": "accuracy",
    "rmse": "root mean squared error",
    "nll": "negative log-likelihood, in nats",
    "crps": "continuous ranked probability score",
    "coverage50": "share of targets in the 50 % interval",
    "coverage90": "share of targets in the 90 % interval",
    "ece": "expected calibration error",
    "brier": "Brier score",
    "auroc_misclassification": "AUROC of the confidence for wrong answers",
    "auroc_ood": "AUROC of the uncertainty for inputs from elsewhere",
}

_SETTINGS = ("data", "train_size", "epochs", "batch_size", "seed", "schedule", "options", "commit")


def export(
    run: Run | str | Path, folder: str | Path, *, name: str | None = None,
    license: str | None = None, scores: Mapping[str, float] | None = None,
) -> Path:  # fmt: skip
    """Write a run as a folder for the Hugging Face Hub: what `load_run` needs, and a README.md.

    The README's metadata has the library's name, tags and scores as the Hub reads them. Paths of this machine
    are reduced to the names of their files in config.toml.

    Args:
        run: The run, or the folder of one that `torchbayes train` made.
        folder: Folder to write, which must be new or empty.
        name: Name of the model, such as `you/digits`; by default that of the folder.
        license: Identifier of a licence, such as `apache-2.0`.
        scores: Scores to show; by default those of `torchbayes evaluate`, if the run has them.

    Returns:
        The path of the card.

    Raises:
        RunError: If the folder is not empty.

    Example:
        >>> import tempfile, torch, torchbayes as tb
        >>> from torchbayes.integrations.hub import export
        >>> x = torch.randn(60, 2)
        >>> run = tb.fit(torch.nn.Linear(2, 2), (x, (x[:, 0] > 0).long()), "ivon", progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     card = export(run, f"{folder}/halves", name="you/halves", scores={"accuracy": 0.93})
        ...     again = tb.load_run(f"{folder}/halves", torch.nn.Linear(2, 2))
        >>> again.posterior
        Gaussian(6 weights of Linear)
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{folder} is not an empty folder: choose another one")
    if not isinstance(run, Run):
        run = load_run(run)
    found = _evaluated(run) if scores is None else dict(scores)
    # A copy: the user's run keeps its own settings and folder.
    public = dataclasses.replace(run, settings=_without_paths(run.settings), folder=None)
    public.save(path)
    (path / ".lock").unlink(missing_ok=True)
    card = path / "README.md"
    write_text(card, _card(public, path.name if name is None else name, license, found))
    return card


def _evaluated(run: Run) -> dict[str, float]:
    """Return the scores in a run's folder, if they are of this run."""
    file = None if run.folder is None else run.folder / "scores.json"
    if file is None or not file.exists():
        return {}
    content = read_json(file, "evaluate the run again")
    made = content.pop("made_with", None) if isinstance(content, dict) else None
    if not isinstance(made, dict) or made.get("run") != RunFolder(file.parent).identity():
        return {}
    return {key: value for key, value in content.items() if key in _SCORES}


def _without_paths(value: Any) -> Any:
    """Return settings in which a path such as `table:/home/me/x.csv` is the name of its file."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value]
    if not isinstance(value, (str, Path)):
        return value
    text = _plain(str(value))
    kind, colon, place = text.partition(":")
    front, rest = (f"{kind}:", place) if colon and len(kind) > 1 else ("", text)
    for style in (PurePosixPath, PureWindowsPath):
        if style(rest).is_absolute() or rest.startswith("~"):
            return f"{front}{style(rest).name}"
    return text


# The card.


def _card(run: Run, name: str, license: str | None, scores: Mapping[str, float]) -> str:
    classes = isinstance(run.likelihood, (Categorical, Bernoulli))
    shown = {key: float(value) for key, value in scores.items() if math.isfinite(float(value))}
    task = _task(run, classes)
    parts = [
        "---", *_metadata(run, name, license, shown, task, classes), "---", "",
        f"# {_shown(name)}", "", *_about(run, classes), "", *_loading(run, name, classes), "",
    ]  # fmt: skip
    if shown:
        parts += ["## Evaluation", "", *_table("score", _named(shown))]
        if run.calibration is not None:
            parts += ["", "These are from before the calibration that `run.predict` applies."]
        parts += [""]
    parts += ["## Training", "", *_table("setting", _settings(run)), ""]
    return "\n".join([*parts, "## Limits", "", *_limits(run, classes)]) + "\n"


def _task(run: Run, classes: bool) -> str | None:
    """Return the Hub's name of the task, if it has one."""
    if run.preprocessing.table is not None:
        return "tabular-classification" if classes else "tabular-regression"
    return "image-classification" if classes and len(run.preprocessing.shape) == 3 else None


def _metadata(
    run: Run, name: str, license: str | None, scores: Mapping[str, float], task: str | None,
    classes: bool,
) -> list[str]:  # fmt: skip
    """Return the lines of the YAML block; every text in it is quoted."""
    lines = [f"library_name: {_quoted('torchbayes')}"]
    if license is not None:
        lines.append(f"license: {_quoted(license)}")
    if task is not None:
        lines.append(f"pipeline_tag: {_quoted(task)}")
    lines += ["tags:"]
    for tag in ("torchbayes", "bayesian", "uncertainty-quantification", run.method):
        lines.append(f"- {_quoted(tag)}")
    if not scores:
        return lines
    data = str(run.settings.get("data") or "unnamed")
    lines += ["metrics:", *(f"- {_quoted(key)}" for key in scores)]
    lines += [
        "model-index:",
        f"- name: {_quoted(name)}",
        "  results:",
        "  - task:",
        f"      type: {_quoted(task or ('classification' if classes else 'regression'))}",
        "    dataset:",
        f"      name: {_quoted(data)}",
        f"      type: {_quoted(data)}",
        "    metrics:",
    ]
    for key, value in scores.items():
        lines += [f"    - type: {_quoted(key)}", f"      value: {_number(value)}"]
    return lines


def _about(run: Run, classes: bool) -> list[str]:
    method = METHODS.get(run.method)
    what = "" if method is None else f" ({_shown(method.summary)}; {_shown(method.paper)})"
    weights = sum(p.numel() for p in run.model.parameters())
    version = _shown(str(run.settings.get("torchbayes", __version__)))
    held = (
        "It is one network: what it knows about its own uncertainty is what its outputs say."
        if isinstance(run.posterior, Point)
        else "It does not hold one set of weights but a distribution over them, and its predictions average "
        "over that distribution: they come with an uncertainty that is split into noise in the data and "
        "doubt about the weights."
    )
    lines = [
        f"{_shown(type(run.model).__name__)} with {weights:,} weights, trained by {_shown(run.method)}{what} "
        f"with [torchbayes](https://github.com/torchbayes/torchbayes) {version}. {held}"
    ]
    names = run.preprocessing.classes
    if classes and names:
        some = ", ".join(_shown(one) for one in names[:50])
        lines += ["", f"Classes: {some}{', …' if len(names) > 50 else ''}."]
    return lines


def _loading(run: Run, name: str, classes: bool) -> list[str]:
    built = isinstance(run.settings.get("build"), dict)
    network = _identifier(type(run.model).__name__)
    model = [] if built else [f"model = {network}(...)  # the network as it was built for training"]
    parts = "p.probs, p.confidence, p.epistemic" if classes else "p.mean, p.std, p.quantile(0.9)"
    return [
        "## How to use it", "",
        "```python",
        "import torchbayes as tb",
        "from huggingface_hub import snapshot_download",
        "", *model,
        f"run = tb.load_run(snapshot_download({_quoted(name)}){'' if built else ', model'})",
        f"p = run.predict(inputs)  # {parts}",
        "```", "",
        *_inputs(run),
        "Nothing is unpickled: the files are safetensors, JSON and TOML, and loading them runs no code.",
    ]  # fmt: skip


def _inputs(run: Run) -> list[str]:
    known = run.preprocessing
    if known.table is not None:
        columns = ", ".join(_shown(column.name) for column in known.table.columns)
        return [
            f"`run.predict` takes a table as a CSV file or a data frame with the columns {columns}, and "
            f"predicts {_shown(known.table.target)}.",
            "",
        ]
    lines = []
    if known.shape:
        image = isinstance(run.settings.get("build"), dict) and len(known.shape) == 3
        also = "; `run.predict` takes image files too" if image else ""
        lines.append(f"One input has the shape {_shown(str(tuple(known.shape)))}{also}.")
    if known.normalise is not None:
        lines.append("`run.predict` normalises inputs as in training: pass them as they are.")
    if known.unknown:
        lines.append(f"Apply {_shown(known.unknown)} to inputs first, as in training.")
    return [" ".join(lines), ""] if lines else []


def _named(scores: Mapping[str, float]) -> dict[str, str]:
    return {_SCORES.get(key, key): f"{value:.4g}" for key, value in scores.items()}


def _settings(run: Run) -> dict[str, str]:
    rows: dict[str, Any] = {"method": run.method} | {
        key: run.settings.get(key) for key in _SETTINGS
    }
    options = rows.pop("options")
    if isinstance(options, dict):
        rows |= {f"option {key}": value for key, value in options.items()}
    return {key: str(value) for key, value in rows.items() if value not in (None, "", [], {})}


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    body = [f"| {_shown(key)} | {_shown(value)} |" for key, value in rows.items()]
    return [f"| {title} | value |", "| --- | ---: |", *body]


def _limits(run: Run, classes: bool) -> list[str]:
    what = "probabilities are" if classes else "intervals are"
    lines = [
        f"- Its {what} about data like those it was trained on. Its uncertainty should rise on other inputs, "
        "but nothing guarantees that it rises enough."
    ]
    if run.calibration is None:
        lines.append("- It has not been calibrated on held-out data; `run.calibrate` does that.")
    lines.append(
        "- What it may be used for, and on whose data it was trained, its author has to say."
    )
    return lines


# Text from outside.


def _plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _quoted(text: str) -> str:
    """Return a double-quoted ASCII string that YAML, JSON-like, and Python read as the same text."""
    result = json.dumps(_plain(text), ensure_ascii=False)
    return "".join(
        c
        if c.isascii() and c.isprintable()
        else f"\\u{ord(c):04x}"
        if ord(c) < 0x10000
        else f"\\U{ord(c):08x}"
        for c in result
    )


def _shown(text: str) -> str:
    """Return text for Markdown in which no character has a meaning of its own."""
    flat = " ".join(_plain(text).split())
    return "".join(
        c if c.isalnum() or c in " .,:;/=-%()" else f"&#{ord(c)};" for c in flat if c.isprintable()
    )


def _identifier(text: str) -> str:
    return text if text.isidentifier() else "Network"


def _number(value: float) -> str:
    """Return a number that YAML takes for one: it wants a point before an exponent."""
    text = f"{value:.6g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text
