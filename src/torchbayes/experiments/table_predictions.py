"""Predictions for the rows of a table, with their uncertainty, in the target's own units."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchbayes.core.storage import atomic_path
from torchbayes.data import DataError, TableEncoding
from torchbayes.data.table import encoded_nothing
from torchbayes.data.table_file import read_text_table
from torchbayes.experiments.trained_run import TrainedRun, run_settings
from torchbayes.predict.results import ClassPredictive, RegressionPredictive
from torchbayes.train.run_folder import RunFolder

__all__ = ["predict_table", "write_csv"]

Row = dict[str, str | float]


def predict_table(run: Path, file: Path, samples: int | None = None) -> tuple[list[Row], list[str]]:
    """Predict the rows of a table with a run that was trained on one.

    The run keeps how its table was encoded, so that the table itself is not needed.

    Args:
        run: Run folder.
        file: Table with the columns of the training table, in any order; the target may be missing.
        samples: Number of draws, by default the run's own setting.

    Returns:
        A row of figures for each row, and sentences about what was unusual. For numbers these are the
        `prediction`, its standard deviation `std`, the 90 % interval from `lower90` to `upper90`, and `std`'s
        parts `epistemic` and `aleatoric`; for classes the `prediction`, its `confidence`, the `entropy` with
        its parts, and the probability `p_NAME` of every class.
    """
    files = RunFolder(run)
    encoding, experiment = TableEncoding.load(files.table_file), run_settings(files)
    text = read_text_table(file, header=encoding.header, least=1)
    if not text.rows:
        raise DataError(f"{file} has column names but no rows: give a row per example")
    inputs, notes = encoding.encode(text)
    data = encoded_nothing(experiment.data, encoding)
    result = TrainedRun(run, experiment=experiment, data=data).predict(inputs, samples)
    if isinstance(result, ClassPredictive):
        return _classes(result, encoding.classes), notes
    assert isinstance(result, RegressionPredictive)
    own = result.rescaled(encoding.mean, encoding.std)
    figures = {
        "prediction": own.mean, "std": own.std, "lower90": own.quantile(0.05),
        "upper90": own.quantile(0.95), "epistemic": own.epistemic, "aleatoric": own.aleatoric,
    }  # fmt: skip
    columns = {name: values.flatten().tolist() for name, values in figures.items()}
    rows: list[Row] = [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ]
    return rows, notes


def _classes(result: ClassPredictive, names: Sequence[str]) -> list[Row]:
    measures = ("confidence", "entropy", "epistemic", "aleatoric")
    columns = {name: getattr(result, name).tolist() for name in measures}
    return [
        {"prediction": names[best]}
        | {name: column[number] for name, column in columns.items()}
        | {f"p_{name}": p for name, p in zip(names, probs, strict=True)}
        for number, (best, probs) in enumerate(
            zip(result.prediction.tolist(), result.probs.tolist(), strict=True)
        )
    ]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a CSV file, as a whole or not at all."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
