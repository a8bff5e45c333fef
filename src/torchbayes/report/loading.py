"""Load and check the folder of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchbayes import metrics
from torchbayes.core.errors import FileError
from torchbayes.core.reading import read_json, read_npz
from torchbayes.experiments.saved_predictions import Predictions, RegressionPredictions
from torchbayes.report.extras import finite_numbers, read_extras
from torchbayes.report.ranking import ranked
from torchbayes.report.results import Images, MethodResult, Results, Row, RunResult
from torchbayes.train.registry import METHODS
from torchbayes.train.run_folder import RunFolder

__all__ = ["load_results"]

_T = TypeVar("_T", str, list[Any], dict[str, Any])


def load_results(folder: str | Path) -> Results:
    """Load the folder that `torchbayes compare` writes.

    The folder of a single run, with `config.toml` and `scores.json`, is loaded as a comparison of one.
    Otherwise only `results.json` is required. Missing files of runs and missing pictures are skipped;
    damaged ones are skipped too and named in `Results.problems`.

    Args:
        folder: Folder with `results.json`.

    Raises:
        ValueError: If `results.json` is missing, damaged or not the result of a comparison.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "results.json").write_text('{"data": "digits", "methods": {"map": {"nll": 1}}}')
        >>> load_results(folder).methods[0].scores
        {'nll': 1.0}
    """
    folder = Path(folder)
    for name in ("results.json", "scores.json", "config.toml", "about.json"):
        _refuse_outside(folder, folder / name)
    table = _one_run(folder) or _read_table(folder / "results.json")
    problems: list[str] = []
    methods = [
        _method(folder, name, index, entry, problems)
        for index, (name, entry) in enumerate(table["methods"].items())
    ]
    ood = table.get("ood")
    return Results(
        version=_get(table, "torchbayes", str),
        created=_get(table, "created", str),
        data=_get(table, "data", str),
        model=_get(table, "model", str),
        classes=tuple(map(str, _get(table, "classes", list))),
        ood=None if ood is None else str(ood),
        notes=tuple(map(str, _get(table, "notes", list))),
        settings=_get(table, "settings", dict),
        methods=ranked(methods),
        failed={name: str(reason) for name, reason in _get(table, "failed", dict).items()},
        images=_images(folder / "images.npz", problems),
        problems=tuple(problems),
    )


def _one_run(folder: Path) -> dict[str, Any] | None:
    """Return the table of a comparison of this run alone, or None if the folder is not a run's."""
    if (folder / "results.json").exists() or not (folder / "scores.json").exists():
        return None
    try:
        scores = read_json(folder / "scores.json", "run `torchbayes evaluate` again")
        config = RunFolder(folder).read_config()
        row = {**scores, "runs": [{"seed": config.get("seed"), "folder": ".", **scores}]}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} is not a finished run: {error}") from error
    named = {key: config.pop(key, None) for key in ("torchbayes", "data", "model", "method")}
    name = _get(named, "method", str) or folder.name
    named["model"] = _get(named, "model", str) or _get(config, "network", str)
    if name in METHODS:
        row |= {"summary": METHODS[name].summary, "paper": METHODS[name].paper}
    data = _get(named, "data", str)
    if data.startswith("table:"):
        named["data"], config["data"] = Path(data.removeprefix("table:")).name, data
    if (folder / "about.json").exists():
        about = read_json(folder / "about.json", "run `torchbayes evaluate` again")
        known = about if isinstance(about, dict) else {}
        named |= {key: known.get(key) for key in ("classes", "ood", "notes")}
    return {**named, "settings": config, "methods": {name: row}}


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = read_json(path, "run `torchbayes compare` again")
    except FileError as error:
        if path.exists():
            raise
        raise FileError(
            f"there is no {path}: give a folder that `torchbayes compare` wrote"
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
    predictions, values, seed = None, None, None
    for run in _get(entry, "runs", list):
        if not isinstance(run, dict):
            continue
        number = run.pop("seed", None)
        # A run of an older version, or one written by hand, may name no folder: it has no files.
        place = _inside(folder, _get(run, "folder", str) or "no-folder", problems)
        result = RunResult(
            number if isinstance(number, int) else None,
            _scores(run),
            _history(place, problems),
            read_extras(place, problems),
        )
        runs.append(result)
        if predictions is None and values is None:
            try:
                if (file := place / "predictions.npz").is_file():
                    predictions, seed = _predictions(file), result.seed
                elif (file := place / "regression.npz").is_file():
                    values, seed = _values(file), result.seed
            except ValueError as error:
                problems.append(f"{name}'s predictions are not shown: {error}")
    return MethodResult(
        name=name,
        index=index,
        summary=_get(entry, "summary", str),
        paper=_get(entry, "paper", str),
        scores=_scores(entry),
        spread=_scores(_get(entry, "spread", dict)),
        runs=tuple(runs),
        predictions=predictions,
        seed=seed,
        values=values,
        point=_is_point(name, entry, predictions, values),
    )


def _is_point(
    name: str, entry: Mapping[str, Any], predictions: Predictions | None,
    values: RegressionPredictions | None,
) -> bool:  # fmt: skip
    """Whether a method is a point estimate: as recorded, else by its name, else by its predictions."""
    kind = _get(entry, "posterior", str)
    if not kind and name in METHODS:
        kind = METHODS[name].posterior_kind
    if kind:
        return kind == "Point"
    if predictions is not None:
        return predictions.draws == 1
    return values is not None and len(values.means) == 1


def _predictions(file: Path) -> Predictions:
    """Load predictions; raise `ValueError` if they cannot be plotted."""
    predictions = Predictions.load(file)
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


def _values(file: Path) -> RegressionPredictions:
    """Load predicted values; raise `ValueError` if they cannot be plotted."""
    values = RegressionPredictions.load(file)
    try:
        metrics.gaussian_mixture_nll(values.means, values.stds, values.targets)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} does not hold usable predictions ({error})") from error
    return values


def _images(file: Path, problems: list[str]) -> Images | None:
    if not file.is_file():
        return None
    try:
        _refuse_outside(file.parent, file)
        archive = read_npz(file, "run `torchbayes compare` again")
        test, ood = archive["test"], archive.get("ood")
        for pictures in (test, ood):
            if pictures is not None and (pictures.ndim != 4 or pictures.dtype.kind not in "uif"):
                raise ValueError("expected numbers of shape (examples, channels, height, width)")
    except (ValueError, KeyError) as error:
        problems.append(f"Pictures are not shown: {file} cannot be used ({error}).")
        return None
    return Images(test, ood)


def _refuse_outside(folder: Path, file: Path) -> None:
    """Raise a `FileError` if a file of the folder is a link to what is outside of it; see `_inside`."""
    try:
        outside = not file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link to itself
        outside = True
    if outside:
        raise FileError(f"{file} leads out of {folder}: put the file itself in its place")


def _inside(folder: Path, name: str, problems: list[str]) -> Path:
    """Return the folder of a run, unless it or a file in it is outside of the comparison's folder.

    A page may be passed on: it must not show what a results.json of unknown origin points at.
    """
    whole, place = folder.resolve(), folder / name
    try:
        parts = [place, place / "pictures", *place.glob("*"), *place.glob("pictures/*")]
        outside = next((p for p in parts if not p.resolve().is_relative_to(whole)), None)
    except (OSError, ValueError):  # a name that no file can have
        outside = place
    if outside is None:
        return place
    problems.append(f"The files of {name!r} are not shown: {outside} leads out of {folder}.")
    return folder / "no-folder"


def _history(run: Path, problems: list[str]) -> tuple[Row, ...]:
    """Read a metrics.jsonl; a kill may have cut the last line short."""
    try:
        rows = RunFolder(run).read_metrics()
    except FileError as error:
        problems.append(f"The course of training is not shown: {error}.")
        return ()
    return tuple(map(finite_numbers, rows))


def _scores(table: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a table; undefined ones, null in JSON or NaN, are None."""
    finite = finite_numbers(table)
    return {k: finite.get(k) for k, v in table.items() if v is None or isinstance(v, (int, float))}


def _get(table: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """Return the value of a key, or an empty one if it is missing or of another type."""
    value = table.get(key)
    return value if isinstance(value, kind) else kind()
