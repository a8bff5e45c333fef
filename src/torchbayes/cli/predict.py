"""`torchbayes predict`: predict images or the rows of a table with a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchbayes.cli import options as opt
from torchbayes.cli.output import answer, cell, table, visible

if TYPE_CHECKING:
    import torch

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
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave out the run's calibration.json, if it has one.")
    ] = False,
    device: opt.Device = None,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Predict image files or the rows of a table, and say how sure the network is and why.

    *Epistemic* uncertainty means that the network has not seen enough examples of this kind; *aleatoric*,
    that the example itself is ambiguous. Both are in nats for classes, and standard deviations in the
    target's units for numbers. If the run has been calibrated (`torchbayes calibrate`), probabilities and
    intervals are the corrected ones, and there are sets of classes and the risk at which to answer.

    Example: `torchbayes predict runs/housing new.csv --out predictions.csv`
    """
    from torchbayes.core.device import process_device
    from torchbayes.experiments.trained_run import run_settings
    from torchbayes.train.run_folder import RunFolder

    place = process_device(device)
    if run_settings(RunFolder(run)).is_table:
        _predict_rows(run, files, out, samples, raw, place, as_json)
        return
    if out is not None:
        raise ValueError("--out is for the rows of a table: use --json for images")
    _predict_images(run, files, samples, raw, place, data_dir, as_json)


def _predict_images(
    run: Path,
    files: list[Path],
    samples: int | None,
    raw: bool,
    device: torch.device,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    import torch

    from torchbayes.data import read_image
    from torchbayes.experiments.table_predictions import predict_rows
    from torchbayes.experiments.trained_run import kept_run

    trained = kept_run(run, data_dir, device)
    shape, name = trained.preprocessing.shape, trained.settings["data"]
    if len(shape) != 3:
        raise ValueError(f"{run} was trained on {name}, which has no images")
    if not trained.preprocessing.classes:
        raise ValueError(f"{run} is a regression on {name}: predict names classes")
    images = torch.stack([read_image(file, shape) for file in files])
    found, notes = predict_rows(trained, images, samples, raw=raw)
    rows = [
        {"file": str(file), "class": row.pop("prediction")}
        | {key: value for key, value in row.items() if not key.startswith("p_")}
        for file, row in zip(files, found, strict=True)
    ]
    columns = _shown(rows[0])
    cells = ([_image_cell(row[name]) for name in columns] for row in rows)
    answer(rows, as_json, table(None, columns, cells, left=2), *notes)
    _echo(notes, as_json)


def _shown(row: dict[str, Any]) -> list[str]:
    """Return the columns for the terminal: of several sets the one nearest to 90 %, of classes none."""
    sets = [name for name, value in row.items() if isinstance(value, list)]
    kept = min(sets, key=lambda name: abs(float(name.removeprefix("set")) - 90), default=None)
    return [n for n in row if not n.startswith("p_") and (n not in sets or n == kept)]


def _image_cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else _cell(value)


def _echo(notes: list[str], as_json: bool) -> None:
    if as_json:
        for note in notes:
            typer.echo(visible(note), err=True)


def _predict_rows(
    run: Path,
    files: list[Path],
    out: Path | None,
    samples: int | None,
    raw: bool,
    device: torch.device,
    as_json: bool,
) -> None:
    from torchbayes.experiments.table_predictions import predict_table, write_csv

    if len(files) > 1:
        raise ValueError(
            f"{run} was trained on a table: give one table to predict, not {len(files)}"
        )
    rows, notes = predict_table(run, files[0], samples, raw=raw, device=device)
    if out is not None:
        write_csv(out, rows)
        notes.append(f"predictions of {len(rows):,} rows: {out}")
    elif len(rows) > _SHOWN_ROWS:
        notes.append(f"{len(rows) - _SHOWN_ROWS:,} more rows: --out FILE.csv writes all")
    # A class has a column of its own in the file only: there may be many.
    columns = _shown(rows[0])
    cells = (
        [str(number), *(_cell(row[name]) for name in columns)]
        for number, row in enumerate(rows[:_SHOWN_ROWS], 1)
    )
    shown = table(None, ["row", *columns], cells, left=0)
    answer(rows, as_json, shown, *notes)
    _echo(notes, as_json)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if value is None:
        return "–"
    # Four digits, but the whole number if it has more.
    return cell(value, ",.0f" if 1000 <= abs(value) < 1e9 else ".4g")
