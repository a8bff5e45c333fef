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
from torchbayes.experiments.trained_run import kept_run, on_cpu
from torchbayes.serving.figures import Row, prediction_rows
from torchbayes.train.run import Run
from torchbayes.train.run_folder import RunFolder

__all__ = ["predict_rows", "predict_table", "write_csv"]


def predict_table(
    run: Path,
    file: Path,
    samples: int | None = None,
    *,
    raw: bool = False,
    device: torch.device | None = None,
) -> tuple[list[Row], list[str]]:
    """Predict the rows of a table with a run that was trained on one.

    The run keeps how its table was encoded, so that the table itself is not needed.

    Args:
        run: Run folder.
        file: Table with the columns of the training table, in any order; the target may be missing.
        samples: Number of draws, by default the run's own setting.
        raw: Leave out the run's calibration.
        device: Device to predict on; the CPU if None.

    Returns:
        The rows of `predict_rows`, and sentences about what was unusual.
    """
    encoding = TableEncoding.load(RunFolder(run).table_file)
    text = read_text_table(file, header=encoding.header, least=1)
    if not text.rows:
        raise DataError(f"{file} has column names but no rows: give a row per example")
    inputs, notes = encoding.encode(text)
    rows, said = predict_rows(kept_run(run, device=device), inputs, samples, raw=raw)
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
        The rows of `prediction_rows`, and sentences about the calibration.
    """
    draws = int(run.settings.get("samples", 32)) if samples is None else samples
    result = run.predict(
        inputs, draws, calibrated=False, generator=torch.Generator().manual_seed(0)
    )
    rows, notes = prediction_rows(run, on_cpu(result), raw=raw)
    return rows, [f"{note} (--raw leaves it out)" for note in notes]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a CSV file, as a whole or not at all; the classes of a set are joined by a bar.

    Text that a spreadsheet would take for a formula, such as a class `=A1`, gets an apostrophe in front.
    """
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(map(_no_formula, rows[0]))
        for row in rows:
            values = (row.get(name) for name in rows[0])
            whole = ("|".join(v) if isinstance(v, list) else v for v in values)
            writer.writerow([_no_formula(v) if isinstance(v, str) else v for v in whole])


def _no_formula(text: str) -> str:
    if not text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return text
    try:
        float(text)  # a class may be called -1
        return text
    except ValueError:
        return f"'{text}"
