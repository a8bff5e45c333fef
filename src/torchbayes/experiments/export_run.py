"""Write a finished run to a file that runs without torchbayes, with what is before and after its network.

The file takes what a person would call an input: pixels from 0 to 1, or the columns of a table in their own
units (a level as an input of 0 or 1), and gives numbers in the target's own units. What cannot be part of a
graph (reading an image, replacing a missing value) is said in the file's description.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.data import TableEncoding
from torchbayes.data.table_encoding import NumberColumn
from torchbayes.experiments.evaluation import finite
from torchbayes.experiments.trained_run import TrainedRun, kept_run
from torchbayes.posterior import Point
from torchbayes.predict.results import Predictive, RegressionPredictive
from torchbayes.serving.export import Exported, export
from torchbayes.serving.service import data_name
from torchbayes.train.run import Run

__all__ = ["export_run"]

_EXAMPLES = 64


def export_run(
    folder: Path, out: Path | None = None, *, format: str | None = None, samples: int | None = None,
    mean: bool = False, raw: bool = False, data_dir: Path | None = None,
) -> tuple[Exported, str]:  # fmt: skip
    """Write a run of the command line to an ONNX or pt2 file.

    Args:
        folder: Run folder.
        out: File, by default `model.onnx` or `model.pt2` in the run folder.
        format: `"onnx"` or `"pt2"`; by default the ending of `out`, or ONNX.
        samples: Number of draws, by default the run's own setting.
        mean: Use the mean weights instead of draws.
        raw: Leave out the run's calibration.
        data_dir: Folder of the data, if not the usual one.

    Returns:
        What was written, and what it was checked on.
    """
    if mean and samples is not None:
        raise ValueError(
            f"--mean is one network, but --samples asks for {samples} draws: give one of them"
        )
    run = kept_run(folder, data_dir)
    if out is None:
        out = folder / f"model.{'onnx' if format is None else format}"
    posterior, draws = run.posterior, samples
    if mean:
        posterior = Point(posterior.mean(), model_name=posterior.model_name, rest=posterior.rest)
    if draws is None:
        draws = int(run.settings.get("samples", 32))
    encoding = run.preprocessing.table
    before = run.preprocessing.normalise if encoding is None else _Standardise(encoding)
    examples, source = _examples(run, folder, data_dir)
    file = export(
        run.model, posterior, examples, out, draws, run.likelihood,
        torch.Generator().manual_seed(0),  # as `torchbayes predict` draws
        format=format, output=run.output, recalibrate=False, before=before,
        after=_Finish(run, raw), about=_about(run, folder, raw),
    )  # fmt: skip
    return file, source


def _examples(run: Run, folder: Path, data_dir: Path | None) -> tuple[Tensor, str]:
    """Return inputs of the file, and say where they are from."""
    encoding = run.preprocessing.table
    try:
        test = TrainedRun(folder, data_dir).data.test
    except (ValueError, OSError):
        # Somebody else's run, without its data.
        inputs = torch.rand(
            _EXAMPLES, *run.preprocessing.shape, generator=torch.Generator().manual_seed(0)
        )
        source = f"{_EXAMPLES} random inputs, because the run's data cannot be loaded"
    else:
        count = min(_EXAMPLES, len(test))
        inputs = torch.stack([test[number][0] for number in range(count)])
        source = f"{count} examples of the test split of {data_name(run)}"
    if inputs.dtype is torch.uint8:
        inputs = inputs.float() / 255
    return (inputs if encoding is None else _Standardise(encoding).undone(inputs)), source


class _Standardise(nn.Module):
    """From the columns of a table in their own units to those that the network was trained with."""

    shift: Tensor
    scale: Tensor

    def __init__(self, encoding: TableEncoding) -> None:
        super().__init__()
        pairs = [pair for column in encoding.columns for pair in _units(column)]
        for name, numbers in zip(("shift", "scale"), zip(*pairs, strict=True), strict=True):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return ((inputs - self.shift) / self.scale).float()

    def undone(self, inputs: Tensor) -> Tensor:
        """Return the columns in their own units."""
        return inputs.double() * self.scale + self.shift


def _units(column: Any) -> list[tuple[float, float]]:
    """Return the mean and the std of each input that a column becomes; levels and marks stay 0 and 1."""
    plain = [(0.0, 1.0)] * len(column.inputs)
    if isinstance(column, NumberColumn) and column.std > 0:
        plain[0] = column.mean, column.std
    return plain


class _Finish:
    """From the network's prediction to the run's: in the target's units, and calibrated."""

    def __init__(self, run: Run, raw: bool) -> None:
        self.table, self.calibration = run.preprocessing.table, None if raw else run.calibration

    def __call__(self, prediction: Predictive) -> Predictive:
        if self.table is not None and isinstance(prediction, RegressionPredictive):
            prediction = prediction.rescaled(self.table.mean, self.table.std)
        return prediction if self.calibration is None else self.calibration(prediction)


def _about(run: Run, folder: Path, raw: bool) -> dict[str, Any]:
    """Return what the file says about the run."""
    known = run.preprocessing
    about: dict[str, Any] = {
        "run": folder.resolve().name, "method": run.method, "data": data_name(run),
        "input": _input(run),
    }  # fmt: skip
    if known.classes:
        about["classes"] = list(known.classes)
    elif known.table is not None:
        about["target"] = known.table.target
    if run.calibration is None:
        return about
    rules = run.calibration
    scale = rules.temperature
    about["calibration"] = {
        "temperature": None if scale is None else scale.temperature,
        "included": not raw and scale is not None,
        "note": "sets and abstention are not in the file; their thresholds are for probabilities before the "
        "temperature, as a file without calibration (--raw) gives them",
        "sets": {str(c): finite(rule.threshold) for c, rule in rules.sets.items()},
        "abstention": {str(r): finite(rule.threshold) for r, rule in rules.abstention.items()},
        "intervals": {
            str(c): [finite(margin) for margin in rule.margin.flatten().tolist()]
            for c, rule in rules.intervals.items()
        },
    }  # fmt: skip
    return about


def _input(run: Run) -> dict[str, Any]:
    known = run.preprocessing
    shape = ["batch", *known.shape]
    if known.table is not None:
        return {
            "shape": shape,
            "type": "float64",
            "columns": [_column(c, name) for c in known.table.columns for name in c.inputs],
        }
    if len(known.shape) != 3:
        return {"shape": shape, "type": "float32", "values": "features in their own units"}
    return {
        "shape": shape,
        "type": "float32",
        "values": "pixels divided by 255: from 0 (black) to 1, channels first",
        "reading": "the largest centred window of these proportions, resized bilinearly with antialiasing",
    }


def _column(column: Any, name: str) -> dict[str, Any]:
    """Describe an input of a table: the column's number, or a mark that is 0 or 1."""
    if isinstance(column, NumberColumn) and name == column.name:
        return {"name": name, "value": "number", "if_missing": column.median}
    return {"name": name, "value": "1 if so, else 0"}
