"""A run that answers requests: checks what was sent, predicts with draws that are made once.

What is wrong with a request is a `RequestError`: a status of HTTP and one sentence.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from torchbayes.data import DataError, TableEncoding, read_image
from torchbayes.data.table_encoding import NumberColumn
from torchbayes.data.table_file import TextTable, shown
from torchbayes.predict.predictor import Predictor
from torchbayes.predict.results import RegressionPredictive
from torchbayes.serving.figures import Row, prediction_rows
from torchbayes.train.run import Run

__all__ = [
    "IMAGE_FORMATS",
    "MOST_EXAMPLES",
    "MOST_PIXELS",
    "RequestError",
    "Service",
    "data_name",
    "parse_json",
]

MOST_EXAMPLES = 1000
MOST_PIXELS = 50_000_000
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # none of those whose readers start programs

_REQUEST = Path("the request")  # in the place of a table's file, in messages


class RequestError(ValueError):
    """What is wrong with a request.

    Attributes:
        status: The status of HTTP: 400 to 499, or 501 for a run whose answers are no rows of figures.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def parse_json(body: bytes) -> Any:
    """Parse the body of a request, which is JSON in UTF-8 without NaN and infinity."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number in JSON")

    try:
        return json.loads(body.decode("utf-8"), parse_constant=refuse)
    except RecursionError:
        raise RequestError(400, "the body is not valid JSON (too deeply nested)") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not valid JSON ({str(error)[:200]})") from None


class Service:
    """A finished run, ready to answer from several threads at a time.

    Args:
        run: The run, such as one of `torchbayes.load_run`: of classes, or of one number.
        samples: Number of draws, which are made here, once.
        name: Name of the run, for people.

    Example:
        >>> import torch, torchbayes as tb
        >>> x = torch.randn(20, 2)
        >>> run = tb.fit(torch.nn.Linear(2, 2), (x, x.argmax(1)), "map", epochs=1, progress=False)
        >>> answer = Service(run, 4).arrays([[0.5, -0.5]])
        >>> sorted(answer["predictions"][0])
        ['aleatoric', 'confidence', 'entropy', 'epistemic', 'prediction', 'probabilities']
    """

    def __init__(self, run: Run, samples: int = 32, name: str = "") -> None:
        self.run, self.name = run, name
        self.predictor = Predictor(
            run.model, run.posterior, samples, run.likelihood, torch.Generator().manual_seed(0),
            output=run.output, recalibrate=False,
        )  # fmt: skip
        self.shape, self.table = run.preprocessing.shape, run.preprocessing.table
        self.draws = self.predictor.samples

    @property
    def takes_images(self) -> bool:
        """Whether inputs are images."""
        return len(self.shape) == 3 and self.shape[0] in (1, 3)

    # What is sent

    def content(self, content: Any) -> Row:
        """Answer the JSON of a request: `{"inputs": […]}` or, of a table, `{"rows": [{…}, …]}`."""
        key = "inputs" if self.table is None else "rows"
        if not isinstance(content, dict) or list(content) != [key]:
            example = (
                '{"inputs": […]}' if self.table is None else '{"rows": [{"column": value, …}, …]}'
            )
            raise RequestError(
                422, f"the body has to be a JSON object with the key {key!r} alone, as in {example}"
            )
        return self.arrays(content[key]) if self.table is None else self.rows(content[key])

    def arrays(self, inputs: Any) -> Row:
        """Answer a list of examples, each a nested list of numbers of the run's shape."""
        self._check_count(inputs, "inputs")
        try:
            array = np.asarray(inputs)
        except (ValueError, OverflowError):
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "iuf":
            raise RequestError(
                422, f"inputs have to be numbers in nested lists, {self._shape_text()}"
            )
        if self.shape and array.shape[1:] != self.shape:
            raise RequestError(
                422,
                f"an input has the shape {list(array.shape[1:])}: expected {self._shape_text()}",
            )
        with np.errstate(over="ignore"):
            numbers = torch.from_numpy(array.astype(np.float32))
        if not bool(numbers.isfinite().all()):
            raise RequestError(422, "inputs contain a number that is too large to compute with")
        if self.takes_images and (float(numbers.min()) < 0 or float(numbers.max()) > 1):
            raise RequestError(
                422,
                f"a pixel is {float(numbers.abs().max()):g}: expected numbers from 0 to 1, so divide "
                "levels of 0 to 255 by 255",
            )
        return self._answer(numbers, [])

    def rows(self, rows: Any) -> Row:
        """Answer rows of a table, each an object of values by column; null is a missing value."""
        assert self.table is not None
        self._check_count(rows, "rows")
        if not all(isinstance(row, dict) for row in rows):
            raise RequestError(422, "rows have to be JSON objects of values by column")
        names = list(dict.fromkeys(name for row in rows for name in row))
        if not self.table.header:
            # Columns have numbers, and are known by their position.
            wanted = [name for name in self.table.names if name != self.table.target]
            if set(names) - {self.table.target} != set(wanted):
                raise RequestError(
                    422, f"rows have to have the columns {', '.join(map(repr, wanted))}"
                )
            names = wanted
        fields = [[_field(row.get(name), name) for name in names] for row in rows]
        text = TextTable(_REQUEST, tuple(names), fields, self.table.header, "")
        try:
            inputs, notes = self.table.encode(text)
        except DataError as error:
            raise RequestError(422, str(error)) from None
        return self._answer(inputs, notes)

    def images(self, files: Sequence[bytes]) -> Row:
        """Answer image files."""
        if not self.takes_images:
            raise RequestError(404, f"{self.name or 'the run'} takes no images: post to /predict")
        self._check_count(files, "files")
        try:
            images = [
                read_image(
                    io.BytesIO(file), self.shape, formats=IMAGE_FORMATS, most_pixels=MOST_PIXELS
                )
                for file in files
            ]
        except DataError as error:
            raise RequestError(422, str(error).partition(": replace")[0]) from None
        except Exception as error:  # Pillow's readers pass on what they stumble over
            raise RequestError(
                422, f"the image that was sent could not be read ({type(error).__name__})"
            ) from None
        return self._answer(torch.stack(images), [])

    def _check_count(self, examples: Any, what: str) -> None:
        if not isinstance(examples, Sequence) or isinstance(examples, str) or len(examples) == 0:
            raise RequestError(422, f"{what} have to be a list of at least one example")
        if len(examples) > MOST_EXAMPLES:
            raise RequestError(
                413,
                f"there are {len(examples):,} examples, more than {MOST_EXAMPLES:,}: send fewer",
            )

    def _shape_text(self) -> str:
        return f"{list(self.shape)} per example" if self.shape else "one entry per example"

    # What is answered

    def _answer(self, inputs: Tensor, notes: list[str]) -> Row:
        try:
            result = self.predictor(self.run.preprocessing(inputs))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if self.shape:
                raise
            # The run does not know the shape of its inputs, so the network is the first to see it.
            reason = str(error).splitlines()[0][:200]
            raise RequestError(422, f"the network cannot take these inputs ({reason})") from None
        if self.table is not None and isinstance(result, RegressionPredictive):
            result = result.rescaled(self.table.mean, self.table.std)
        try:
            rows, said = prediction_rows(self.run, result)
        except ValueError as error:  # several labels or numbers, which only the network could show
            raise RequestError(501, str(error)) from None
        return {
            "predictions": [_nested(row) for row in rows],
            "draws": self.draws,
            "notes": [*notes, *said],
        }

    def schema(self) -> Row:
        """Describe inputs and answers."""
        known, rules = self.run.preprocessing, self.run.calibration
        scale = None if rules is None else rules.temperature
        return {
            "name": self.name,
            "method": self.run.method,
            "network": type(self.run.model).__name__,
            "data": data_name(self.run),
            "draws": self.draws,
            "classes": list(known.classes),
            "target": None if self.table is None else self.table.target,
            "input": self._input(),
            "calibration": None if rules is None else {
                "temperature": None if scale is None else scale.temperature,
                "coverages": sorted(rules.sets or rules.intervals),
                "risks": sorted(rules.abstention),
            },
            "limits": {"examples": MOST_EXAMPLES, "pixels": MOST_PIXELS, "formats": IMAGE_FORMATS},
        }  # fmt: skip

    def _input(self) -> Row:
        if self.table is not None:
            return {"kind": "table", "columns": _columns(self.table)}
        kind = "image" if self.takes_images else "array"
        values = "numbers from 0 to 1" if self.takes_images else "numbers"
        return {"kind": kind, "shape": list(self.shape), "values": values}


def data_name(run: Run) -> str:
    """Return the name of a run's data, of a file or folder without its path."""
    kind, _, path = str(run.settings.get("data", "")).partition(":")
    return f"{kind}:{Path(path).name}" if path else kind


def _field(value: Any, name: str) -> str:
    """Return the text that a table's file would have."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(
            422,
            f"column {shown(name)} has a JSON {type(value).__name__}: expected a number, a text as it is in "
            "the training table, or null",
        )
    return repr(value)


def _columns(encoding: TableEncoding) -> list[Row]:
    found: list[Row] = []
    for column in encoding.columns:
        if isinstance(column, NumberColumn):
            found.append({"name": column.name, "kind": "number", "typical": column.median})
        else:
            levels = list(column.levels)
            found.append(
                {"name": column.name, "kind": "level", "levels": levels, "typical": column.mode}
            )
    return found


def _nested(row: Row) -> Row:
    """Return a row for JSON: probabilities and sets in tables of their own, infinite ends as null."""
    result: Row = {}
    for name, value in row.items():
        if name.startswith("p_"):
            result.setdefault("probabilities", {})[name[2:]] = value
        elif isinstance(value, list):
            result.setdefault("sets", {})[name.removeprefix("set")] = value
        else:
            result[name] = value
    for name, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            if name not in ("lower90", "upper90"):
                raise RequestError(
                    422, f"the {name} is not finite: the input is too far from the training data"
                )
            result[name] = None
    return result
