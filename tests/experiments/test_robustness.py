"""Runs and comparisons on damaged images, with what they cost; a failed run among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from typer.testing import CliRunner

from torchbayes.cli import app
from torchbayes.data import CORRUPTIONS, corrupt, load_data
from torchbayes.data.transform import Normalise
from torchbayes.experiments import compare
from torchbayes.experiments.robustness import corruption_scores
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("comparison") / "c"
    arguments = [
        "compare", "--methods", "map,dropout,ensemble", "--epochs", "1", "--samples", "3",
        "--set", "ensemble.members=2", "--set", "dropout.p=1.5", "--out", str(out),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return out


def test_a_failed_run_does_not_stop_the_others(comparison: Path) -> None:
    results = json.loads((comparison / "results.json").read_text())
    assert list(results["methods"]) == ["map", "ensemble"]
    assert "1.5" in results["failed"]["dropout"]
    assert "What did not finish" in (comparison / "report.html").read_text()


def test_costs_beside_quality(comparison: Path) -> None:
    rows = json.loads((comparison / "results.json").read_text())["methods"]
    weights = rows["map"]["parameters"]
    assert rows["map"]["stored"] == weights
    assert rows["ensemble"]["stored"] == 2 * weights
    for row in rows.values():
        assert row["seconds_per_epoch"] == row["seconds"]  # one epoch
        assert row.get("peak_memory", 0) >= 0


def test_scores_are_those_of_the_damaged_images(comparison: Path) -> None:
    folder = comparison / "runs" / "ensemble-0"
    table = json.loads((folder / "corruptions.json").read_text())
    assert table["kinds"].keys() == CORRUPTIONS.keys()
    assert "not the published files" in table["note"]
    run, data = TrainedRun(folder), load_data("digits")
    targets = data.test.targets.numpy()
    for kind, severity in (("noise", 5), ("jpeg", 1), ("rotation", 3)):
        images = Normalise(data.mean, data.std)(corrupt(data.test.inputs, kind, severity))
        probs = run.predict(images).probs.double().numpy()
        row = table["kinds"][kind][severity - 1]
        assert row["severity"] == severity
        assert row["accuracy"] == pytest.approx(accuracy_score(targets, probs.argmax(1)))
        probs /= probs.sum(1, keepdims=True)
        assert row["nll"] == pytest.approx(log_loss(targets, probs), rel=1e-4)
    clean = json.loads((folder / "scores.json").read_text())
    assert {key: clean[key] for key in table["clean"]} == pytest.approx(table["clean"])


def test_the_course_over_draws_ends_at_the_score(comparison: Path) -> None:
    folder = comparison / "runs" / "ensemble-0"
    course = json.loads((folder / "draws.json").read_text())["rows"]
    scores = json.loads((folder / "scores.json").read_text())
    assert [row["draws"] for row in course] == [1, 2]
    assert course[-1]["nll"] == pytest.approx(scores["nll"])


def test_evaluate_with_corruptions(comparison: Path) -> None:
    folder = comparison / "runs" / "map-0"
    before = (folder / "corruptions.json").read_text()
    (folder / "corruptions.json").unlink()
    assert CliRunner().invoke(app, ["evaluate", str(folder)]).exit_code == 0
    assert not (folder / "corruptions.json").exists()
    result = CliRunner().invoke(app, ["evaluate", str(folder), "--corruptions"])
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "corruptions.json").read_text()) == json.loads(before)


def test_what_there_is_can_be_read_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = compare.train_experiment

    def interrupted(experiment: Experiment, *arguments: Any, **options: Any) -> Any:
        if experiment.method == "mle":
            raise KeyboardInterrupt("stopped by SIGINT")
        return train(experiment, *arguments, **options)

    monkeypatch.setattr(compare, "train_experiment", interrupted)
    arguments = ["compare", "--methods", "map,mle", "--epochs", "1", "--no-corruptions"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "c")])
    assert result.exit_code != 0
    assert "map on digits" in (tmp_path / "c" / "report.html").read_text()
    monkeypatch.undo()
    again = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "c"), "--resume"])
    assert again.exit_code == 0, again.output
    results = json.loads((tmp_path / "c" / "results.json").read_text())
    assert list(results["methods"]) == ["map", "mle"]
    assert not (tmp_path / "c" / "runs" / "map-0" / "corruptions.json").exists()


def test_what_cannot_be_corrupted() -> None:
    with pytest.raises(ValueError, match="moons has no labelled images"):
        corruption_scores(lambda batches: torch.zeros(0), load_data("moons"))  # type: ignore[arg-type,return-value]
