"""A run's predictions as rows of named figures, with what its calibration says."""

from __future__ import annotations

from typing import Any

from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import ClassPredictive, Predictive, RegressionPredictive
from torchbayes.train.run import Run

__all__ = ["Row", "prediction_rows"]

Row = dict[str, Any]


def prediction_rows(
    run: Run, prediction: Predictive, *, raw: bool = False
) -> tuple[list[Row], list[str]]:
    """Return a row of figures for each example, and sentences about the calibration.

    For numbers these are the `prediction`, its standard deviation `std`, the 90 % interval from `lower90` to
    `upper90`, and `std`'s parts `epistemic` and `aleatoric`; for classes the `prediction`, its `confidence`,
    the `entropy` with its parts, and the probability `p_NAME` of every class. With a calibration, the
    interval is the corrected one; for classes there are the set of classes for each coverage, such as
    `set90`, and the smallest `risk` at which the example is answered, None if at none.

    Args:
        run: Finished run.
        prediction: Its prediction before calibration, in the target's own units.
        raw: Leave out the run's calibration.

    Raises:
        ValueError: If an example has more than one label or number.
    """
    if isinstance(prediction, RegressionPredictive):
        return _numbers(run, prediction, raw)
    if isinstance(prediction, BinaryPredictive):
        prediction = prediction.as_classes()
    if not isinstance(prediction, ClassPredictive) or prediction.probs.dim() > 2:
        raise ValueError(
            f"an example has several labels ({type(prediction).__name__}), and rows of figures are for one: "
            "use Run.predict in Python"
        )
    return _classes(run, prediction, raw)


def _numbers(run: Run, result: RegressionPredictive, raw: bool) -> tuple[list[Row], list[str]]:
    if result.mean.numel() != len(result):
        raise ValueError(
            f"an example has {result.mean[0].numel()} numbers, and rows of figures are for one: use "
            "Run.predict in Python"
        )
    rule = None if raw or run.calibration is None else run.calibration.intervals.get(0.9)
    notes = []
    if rule is None:
        lower, upper = result.quantile(0.05), result.quantile(0.95)
    else:
        lower, upper = rule(result)
        notes = ["the 90 % intervals are corrected as calibration.json says"]
    figures = {
        "prediction": result.mean, "std": result.std, "lower90": lower, "upper90": upper,
        "epistemic": result.epistemic, "aleatoric": result.aleatoric,
    }  # fmt: skip
    columns = {name: values.flatten().tolist() for name, values in figures.items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows, notes


def _classes(run: Run, raw: ClassPredictive, only: bool) -> tuple[list[Row], list[str]]:
    names = run.preprocessing.classes or tuple(map(str, range(raw.probs.shape[1])))
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
        notes.append(f"sets and risks of calibration.json, {probabilities}")
    rows = [
        {"prediction": names[best]}
        | {name: column[number] for name, column in columns.items()}
        | {f"p_{name}": p for name, p in zip(names, probs, strict=True)}
        for number, (best, probs) in enumerate(
            zip(result.prediction.tolist(), result.probs.tolist(), strict=True)
        )
    ]
    return rows, notes
