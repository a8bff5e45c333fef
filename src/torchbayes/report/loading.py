"""Reading a comparison's folder, checked on the way in."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchbayes import metrics
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.report.extras import read_extras
from torchbayes.report.results import Images, MethodResult, Results, Row, RunResult
from torchbayes.train.run_folder import RunFolder

__all__ = ["load_results"]


def load_results(folder: str | Path) -> Results:
    """Read the folder that `torchbayes compare` writes.

    A single run's folder, with `config.toml` and `scores.json`, is read as a comparison of one. Otherwise
    only `results.json` has to be there. Files of single runs and pictures that are missing are left
    out; those that are damaged are left out too and named in `Results.problems`.

    Args:
        folder: The folder with `results.json`.

    Raises:
        ValueError: If `results.json` is missing, damaged or something else.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "results.json").write_text('{"data": "digits", "methods": {"map": {"nll": 1}}}')
        >>> load_results(folder).methods[0].scores
        {'nll': 1.0}
    """
    folder = Path(folder)
    table = _one_run(folder) or _read_table(folder / "results.json")
    problems: list[str] = []
    methods = tuple(
        _method(folder, str(name), index, entry, problems)
        for index, (name, entry) in enumerate(table["methods"].items())
    )
    failed = table.get("failed")
    settings = table.get("settings")
    ood = table.get("ood")
    return Results(
        version=_text(table.get("torchbayes")),
        created=_text(table.get("created")),
        data=_text(table.get("data")),
        model=_text(table.get("model")),
        classes=tuple(str(name) for name in _list(table.get("classes"))),
        ood=None if ood is None else str(ood),
        notes=tuple(str(note) for note in _list(table.get("notes"))),
        settings=settings if isinstance(settings, dict) else {},
        methods=methods,
        failed={str(k): str(v) for k, v in failed.items()} if isinstance(failed, dict) else {},
        images=_images(folder / "images.npz", problems),
        problems=tuple(problems),
    )


def _one_run(folder: Path) -> dict[str, Any] | None:
    """The table that a comparison of this run alone would have, if the folder is a run's."""
    if (folder / "results.json").exists() or not (folder / "scores.json").exists():
        return None
    try:
        scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        config = RunFolder(folder).read_config()
        row = {**scores, "runs": [{"seed": config.get("seed"), "folder": ".", **scores}]}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} is not a finished run: {error}") from error
    shown = {k: v for k, v in config.items() if k not in ("data", "model", "method", "torchbayes")}
    return {
        "torchbayes": config.get("torchbayes"),
        "data": config.get("data"),
        "model": config.get("model"),
        "settings": shown,
        "methods": {_text(config.get("method")) or folder.name: row},
    }


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no {path}: give a folder that `torchbayes compare` wrote"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as JSON ({error}): run `torchbayes compare` again"
        ) from error
    if not isinstance(table, dict) or not isinstance(table.get("methods"), dict):
        raise ValueError(
            f'{path} is not the result of a comparison, it has no table "methods": '
            "give a folder that `torchbayes compare` wrote"
        )
    for name, entry in table["methods"].items():
        if not isinstance(entry, dict):
            raise ValueError(
                f"{path} is damaged, the entry of method {name!r} is {entry!r} instead of a table "
                "of scores: run `torchbayes compare` again"
            )
    return table


def _method(
    folder: Path, name: str, index: int, entry: dict[str, Any], problems: list[str]
) -> MethodResult:
    runs: list[RunResult] = []
    predictions, seed = None, None
    for run in _list(entry.get("runs")):
        if not isinstance(run, dict):
            continue
        number = run.get("seed")
        # Of an older version, or written by hand: a run that names no folder has no files.
        place = folder / (_text(run.get("folder")) or "no-folder")
        result = RunResult(
            number if isinstance(number, int) else None,
            _scores(run, without=("seed",)),
            _history(place / "metrics.jsonl"),
            read_extras(place, problems),
        )
        runs.append(result)
        file = place / "predictions.npz"
        if predictions is None and file.is_file():
            try:
                predictions, seed = _predictions(file), result.seed
            except ValueError as error:
                problems.append(f"{name}'s predictions are not shown: {error}")
    spread = entry.get("spread")
    return MethodResult(
        name=name,
        index=index,
        summary=_text(entry.get("summary")),
        paper=_text(entry.get("paper")),
        scores=_scores(entry),
        spread=_scores(spread) if isinstance(spread, dict) else {},
        runs=tuple(runs),
        predictions=predictions,
        seed=seed,
    )


def _predictions(file: Path) -> Predictions:
    """Read predictions, or raise a `ValueError` if a figure could not be drawn of them."""
    if not zipfile.is_zipfile(file):
        raise ValueError(f"{file} is cut short or damaged")
    try:
        predictions = Predictions.load(file)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} is damaged") from error
    parts = [(predictions.probs, predictions.aleatoric, predictions.targets)]
    if predictions.ood_probs is not None and predictions.ood_aleatoric is not None:
        nothing = torch.zeros(len(predictions.ood_probs), dtype=torch.int64)
        parts.append((predictions.ood_probs, predictions.ood_aleatoric, nothing))
    try:
        for probs, aleatoric, targets in parts:
            metrics.nll(probs, targets)
            if aleatoric.shape != targets.shape or not bool(aleatoric.isfinite().all()):
                raise ValueError("the expected entropies are not one finite number an example")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} does not hold usable predictions ({error})") from error
    return predictions


def _images(file: Path, problems: list[str]) -> Images | None:
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
            test = archive["test"]
            ood = archive["ood"] if "ood" in archive.files else None
        for pictures in (test, ood):
            if pictures is not None and (pictures.ndim != 4 or pictures.dtype.kind not in "uif"):
                raise ValueError("expected numbers of shape (examples, channels, height, width)")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        problems.append(f"Pictures are not shown: {file} cannot be used ({error}).")
        return None
    return Images(test, ood)


def _history(file: Path) -> tuple[Row, ...]:
    """The whole lines of a metrics.jsonl; a kill may have cut the last one short."""
    rows: list[Row] = []
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                break
            if isinstance(row, dict):
                numbers = {key: _number(value) for key, value in row.items()}
                rows.append({key: value for key, value in numbers.items() if value is not None})
    return tuple(rows)


def _scores(table: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, float | None]:
    return {
        key: _number(value)
        for key, value in table.items()
        if key not in without and (value is None or isinstance(value, (int, float)))
    }


def _number(value: Any) -> float | None:
    """A finite number, or None: what is undefined is null in JSON, NaN elsewhere."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
