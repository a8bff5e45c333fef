"""Rows of a comparison with settings of their own, and the last sample of a chain as a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torchbayes.experiments.compare import Comparison, rows_from
from torchbayes.experiments.evaluation import evaluate
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.report import load_results, write_report
from torchbayes.train.progress import NoProgress
from torchbayes.train.run_folder import RunFolder

SHARED = {"epochs": 2, "examples": 300, "model": "mlp", "model_options": {"hidden": [16]}}
TABLES = {
    "plain": {"method": "map", "epochs": 1},
    "wide": {"method": "map", "model_options": {"hidden": [32]}},
    "chain": {"method": "sgld", "options": {"samples": 3}},
    "one": {"last_of": "chain"},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    rows = rows_from(TABLES, SHARED, {}, {"plain": {"lr": 0.01}})
    base = Experiment.from_settings(SHARED, "test")
    Comparison(base, rows, [0, 1], folder).run(lambda *_: NoProgress(), lambda *_: None)
    return folder


def test_every_row_has_its_own_settings(out: Path) -> None:
    table = json.loads((out / "results.json").read_text())["methods"]
    assert list(table) == list(TABLES)
    assert table["plain"]["settings"] == {"epochs": 1, "options": {"lr": 0.01}}
    assert table["wide"]["parameters"] > table["plain"]["parameters"]
    config = RunFolder(out / "runs" / "plain-1").read_config()
    assert (config["seed"], config["epochs"], config["train_size"]) == (1, 1, 300)


def test_the_last_sample_is_scored_alone(out: Path) -> None:
    folder = out / "runs" / "chain-0"
    run = TrainedRun(folder)
    weights = run.posterior()[-1]
    one = Predictions.load(folder / "last" / "predictions.npz")
    whole = Predictions.load(folder / "predictions.npz")
    assert (one.draws, whole.draws) == (1, 3)
    images = run.data.test.inputs.float() / (1 if run.data.test.inputs.is_floating_point() else 255)
    shape = (1, -1, 1, 1)
    images = (images - torch.tensor(run.data.mean).view(shape)) / torch.tensor(run.data.std).view(
        shape
    )
    expected = torch.func.functional_call(run.model.eval(), weights, (images,)).softmax(1)
    torch.testing.assert_close(one.probs, expected, atol=1e-5, rtol=1e-4)
    results = load_results(out)
    single = results.find("one")
    assert single is not None
    assert "last sample of chain" in single.summary
    assert single.predictions is not None
    assert "one" in write_report(out).read_text()


def test_a_posterior_without_samples_has_no_last_one(out: Path) -> None:
    with pytest.raises(ValueError, match="no last sample"):
        evaluate(TrainedRun(out / "runs" / "plain-0"), last=True)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"one": {"last_of": "none"}}, "names a row above"),
        ({"a": {"data": "moons"}}, "all rows of a comparison share it"),
        ({"a": {"epocs": 1}}, "did you mean 'epochs'"),
    ],
)
def test_bad_rows_are_named(tables: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_from(tables, SHARED, {}, {})


def test_more_examples_than_there_are(out: Path) -> None:
    with pytest.raises(ValueError, match="examples is 99999"):
        Experiment(examples=99999).load_data(None)
