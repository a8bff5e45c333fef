"""`torchbayes calibrate` on a real run: the file, its figures, and which split it was fitted on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss
from typer.testing import CliRunner

from torchbayes.cli import app
from torchbayes.core.reading import read_json
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.report import write_report


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("validation", ["0", "0.3"])
def test_calibrate_writes_what_it_prints(validation: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run(
        "train", "--data", "digits", "--method", "mle", "--epochs", "8", "--validation", validation,
        "--model-set", "hidden=[64]", "--out", folder, "--json",
    )  # fmt: skip
    table = json.loads(run("calibrate", folder, "--json"))
    saved = read_json(tmp_path / "run" / "calibration.json", "")
    assert saved.pop("made_with")["samples"] == 32
    assert table == saved
    own = validation != "0"
    assert table["fitted_on"] == ("the validation split" if own else "half of the test split")
    assert (table["fitted"], table["scored"]) == ((404, 450) if own else (225, 225))
    scale = table["temperature"]
    assert scale["after"]["accuracy"] == scale["before"]["accuracy"]
    if own:
        saved = Predictions.load(tmp_path / "run" / "predictions.npz")
        probs = saved.probs.double().numpy()
        probs /= probs.sum(
            1, keepdims=True
        )  # float32 sums to 1 less exactly than scikit-learn asks
        expected = log_loss(saved.targets.numpy(), probs, labels=range(10))
        assert scale["before"]["nll"] == pytest.approx(expected, rel=1e-4)
    for row in table["conformal"]:
        share = row["target"]
        error = math.sqrt(share * (1 - share) * (1 / table["fitted"] + 1 / table["scored"]))
        assert abs(row["coverage"] - share) < 4 * error
    sizes = [row["mean_size"] for row in table["conformal"]]
    assert np.all(np.diff(sizes) >= 0)
    assert [row["target"] for row in table["abstention"]] == [0.01, 0.02, 0.05]
    assert "prediction sets" in run("calibrate", folder)


def test_calibrate_gives_a_regression_intervals(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(
        "train", "--data", "bbb-curve", "--method", "map", "--epochs", "30", "--samples", "1",
        "--model-set", "hidden=[16]", "--out", str(folder), "--json",
    )  # fmt: skip
    table = json.loads(run("calibrate", str(folder), "--json"))
    saved = read_json(folder / "calibration.json", "")
    assert saved.pop("made_with")["samples"] == 1
    assert table == saved
    assert (table["fitted"], table["scored"]) == (500, 500)
    assert [row["score"] for row in table["intervals"]] == 3 * [None, "residual", "quantile"]
    for row in table["intervals"]:
        if row["score"] is not None:
            share = row["target"]
            error = math.sqrt(share * (1 - share) * (1 / 500 + 1 / 500))
            assert abs(row["coverage"] - share) < 4 * error
    for score in ("residual", "quantile"):
        widths = [row["width"] for row in table["intervals"] if row["score"] == score]
        assert np.all(np.diff(widths) > 0)
    assert "absolute residual" in run("calibrate", str(folder))
    page = write_report(folder).read_text(encoding="utf-8")
    assert "quantile (CQR)" in page
    assert "Temperature" not in page
    result = CliRunner().invoke(app, ["calibrate", str(folder), "--coverages", "few"])
    assert "expected shares" in str(result.exception)
