"""Predictions for new examples with their uncertainty, in the target's own units, as rows of figures."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchbayes.core.storage import atomic_path
from torchbayes.data import DataError, TableEncoding
from torchbayes.data.table_file import read_text_table
from torchbayes.experiments.trained_run import kept_run
from torchbayes.predict.results import ClassPredictive, RegressionPredictive
from torchbayes.train.run import Run
from torchbayes.train.run_folder import RunFolder

__all__ = ["predict_rows", "predict_table", "write_csv"]

Row = dict[str, Any]


def predict_table(
    run: Path, file: Path, samples: int | None = None, *, raw: bool = False
) -> tuple[list[Row], list[str]]:
    """Predict the rows of a table with a run that was trained on one.

    The run keeps how its table was encoded, so that the table itself is not needed.

    Args:
        run: Run folder.
        file: Table with the columns of the training table, in any order; the target may be missing.
        samples: Number of draws, by default the run's own setting.
        raw: Leave out the run's calibration.

    Returns:
        The rows of `predict_rows`, and sentences about what was unusual.
    """
    encoding = TableEncoding.load(RunFolder(run).table_file)
    text = read_text_table(file, header=encoding.header, least=1)
    if not text.rows:
        raise DataError(f"{file} has column names but no rows: give a row per example")
    inputs, notes = encoding.encode(text)
    rows, said = predict_rows(kept_run(run), inputs, samples, raw=raw)
    return rows, notes + said


def predict_rows(
    run: Run, inputs: Any, samples: int | None = None, *, raw: bool = False
) -> tuple[list[Row], list[str]]:
    """Predict examples with a run of the command line.

    Args:
        run: Finished run.
        inputs: What `Run.predict` takes.
        samples: Number of draws, by default the run's own setting.
        raw: Leave out the run's calibration.

    Returns:
        A row of figures for each example, and sentences about the calibration. For numbers these are the
        `prediction`, its standard deviation `std`, the 90 % interval from `lower90` to `upper90`, and `std`'s
        parts `epistemic` and `aleatoric`; for classes the `prediction`, its `confidence`, the `entropy` with
        its parts, and the probability `p_NAME` of every class. With a calibration, the interval is the
        corrected one; for classes there are the set of classes for each coverage, such as `set90`, and the
        smallest `risk` at which the example is answered, None if at none.
    """
    draws = int(run.settings.get("samples", 32)) if samples is None else samples
    result = run.predict(
        inputs, draws, calibrated=False, generator=torch.Generator().manual_seed(0)
    )
    if isinstance(result, RegressionPredictive):
        return _numbers(run, result, raw)
    assert isinstance(result, ClassPredictive)
    return _classes(run, result, raw)


def _numbers(run: Run, result: RegressionPredictive, raw: bool) -> tuple[list[Row], list[str]]:
    rule = None if raw or run.calibration is None else run.calibration.intervals.get(0.9)
    notes = []
    if rule is None:
        lower, upper = result.quantile(0.05), result.quantile(0.95)
    else:
        lower, upper = rule(result)
        notes = ["the 90 % intervals are corrected as calibration.json says (--raw leaves it out)"]
    figures = {
        "prediction": result.mean, "std": result.std, "lower90": lower, "upper90": upper,
        "epistemic": result.epistemic, "aleatoric": result.aleatoric,
    }  # fmt: skip
    columns = {name: values.flatten().tolist() for name, values in figures.items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows, notes


def _classes(run: Run, raw: ClassPredictive, only: bool) -> tuple[list[Row], list[str]]:
    names: Sequence[str] = run.preprocessing.classes
    calibration = None if only else run.calibration
    result = raw if calibration is None else calibration(raw)
    assert isinstance(result, ClassPredictive)
    measures = ("confidence", "entropy", "epistemic", "aleatoric")
    columns: dict[str, list[Any]] = {name: getattr(result, name).tolist() for name in measures}
    notes = []
    if calibration is not None:
        for coverage, rule in calibration.sets.items():
            columns[f"set{100 * coverage:g}"] = [
                [name for name, inside in zip(names, row, strict=True) if inside]
                for row in rule(raw).tolist()
            ]
        answers = {
            risk: rule(raw).tolist() for risk, rule in sorted(calibration.abstention.items())
        }
        if answers:
            columns["risk"] = [
                next((risk for risk, yes in answers.items() if yes[number]), None)
                for number in range(len(raw))
            ]
        scale = calibration.temperature
        probabilities = (
            "probabilities as they are, because its temperature made them worse"
            if scale is None
            else f"probabilities at its temperature, {scale.temperature:.3g}"
        )
        notes.append(f"sets and risks of calibration.json, {probabilities} (--raw leaves it out)")
    rows = [
        {"prediction": names[best]}
        | {name: column[number] for name, column in columns.items()}
        | {f"p_{name}": p for name, p in zip(names, probs, strict=True)}
        for number, (best, probs) in enumerate(
            zip(result.prediction.tolist(), result.probs.tolist(), strict=True)
        )
    ]
    return rows, notes


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a CSV file, as a whole or not at all; the classes of a set are joined by a bar."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {key: "|".join(v) if isinstance(v, list) else v for key, v in row.items()}
            for row in rows
        )
