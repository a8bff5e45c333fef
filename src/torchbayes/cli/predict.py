"""`torchbayes predict`: predict images or the rows of a table with a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from torchbayes.cli import options as opt
from torchbayes.cli.output import answer, cell, table

__all__ = ["predict"]

_SHOWN_ROWS = 20


def predict(
    run: opt.RunFolder,
    files: Annotated[
        list[Path], typer.Argument(help="Image files; or a table of rows, with or without target.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Of a table: CSV file for all predictions.")
    ] = None,
    samples: opt.RunSamples = None,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Predict image files or the rows of a table, and say how sure the network is and why.

    *Epistemic* uncertainty means that the network has not seen enough examples of this kind; *aleatoric*,
    that the example itself is ambiguous. Both are in nats for classes, and standard deviations in the
    target's units for numbers.

    Example: `torchbayes predict runs/housing new.csv --out predictions.csv`
    """
    from torchbayes.experiments.trained_run import run_settings
    from torchbayes.train.run_folder import RunFolder

    if run_settings(RunFolder(run)).is_table:
        _predict_rows(run, files, out, samples, as_json)
        return
    if out is not None:
        raise ValueError("--out is for the rows of a table: use --json for images")
    _predict_images(run, files, samples, data_dir, as_json)


def _predict_images(
    run: Path, files: list[Path], samples: int | None, data_dir: Path | None, as_json: bool
) -> None:
    import torch

    from torchbayes.data import read_image
    from torchbayes.data.transform import Normalise
    from torchbayes.experiments.trained_run import TrainedRun
    from torchbayes.predict.results import ClassPredictive

    trained = TrainedRun(run, data_dir)
    if len(trained.data.shape) != 3:
        raise ValueError(f"{run} was trained on {trained.data.name}, which has no images")
    trained.require_classes("predict names classes")
    images = torch.stack([read_image(file, trained.data.shape) for file in files])
    normalise = Normalise(trained.data.mean, trained.data.std)
    result = trained.predict(normalise(images, torch.Generator()), samples)
    assert isinstance(result, ClassPredictive)
    measures = ("confidence", "entropy", "aleatoric", "epistemic")
    rows = [
        {"file": str(file), "class": trained.data.classes[int(result.prediction[i])]}
        | {name: float(getattr(result, name)[i]) for name in measures}
        for i, file in enumerate(files)
    ]
    cells = ([v if isinstance(v, str) else f"{v:.3f}" for v in r.values()] for r in rows)
    answer(rows, as_json, table(None, rows[0], cells, left=2))


def _predict_rows(
    run: Path, files: list[Path], out: Path | None, samples: int | None, as_json: bool
) -> None:
    from torchbayes.experiments.table_predictions import predict_table, write_csv

    if len(files) > 1:
        raise ValueError(
            f"{run} was trained on a table: give one table to predict, not {len(files)}"
        )
    rows, notes = predict_table(run, files[0], samples)
    if out is not None:
        write_csv(out, rows)
        notes.append(f"predictions of {len(rows):,} rows: {out}")
    elif len(rows) > _SHOWN_ROWS:
        notes.append(f"{len(rows) - _SHOWN_ROWS:,} more rows: --out FILE.csv writes all")
    # A class has a column of its own in the file only: there may be many.
    columns = [name for name in rows[0] if not name.startswith("p_")]
    cells = (
        [str(number), *(_cell(row[name]) for name in columns)]
        for number, row in enumerate(rows[:_SHOWN_ROWS], 1)
    )
    shown = table(None, ["row", *columns], cells, left=0)
    answer(rows, as_json, shown, *notes)
    if as_json:
        for note in notes:
            typer.echo(note, err=True)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    # Four digits, but the whole number if it has more.
    return cell(value, ",.0f" if 1000 <= abs(value) < 1e9 else ".4g")
