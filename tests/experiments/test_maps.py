"""A run on maps of classes: scores by position, the calibration file and the report."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes import metrics
from torchbayes.core.reading import read_json
from torchbayes.data import DataSet, OutOfDistribution, Split
from torchbayes.experiments.calibrate import calibrate
from torchbayes.experiments.evaluation import evaluate, scored_with
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.posthoc import positions
from torchbayes.report import write_report


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))


def pictures(count: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count, 6, 6), generator=generator)
    noise = torch.randn(count, 1, 6, 6, generator=generator)
    return Split(labels[:, None] + 0.5 * noise, labels)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("maps") / "run"
    data = DataSet(
        "blobs", pictures(100, 0), pictures(60, 1), None, ("a", "b", "c"), (1, 6, 6), (0.0,), (1.0,)
    )
    experiment = Experiment(method="map", epochs=10, samples=1, options={"lr": 0.03})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "model_factory", lambda _self, _data: net)
        tb.fit(
            net, (data.train.inputs, data.train.targets), "map", epochs=10, lr=0.03, batch_size=20,
            folder=folder, config=experiment.settings(), progress=False,
        )  # fmt: skip
        return TrainedRun(folder, experiment=experiment, data=data)


def test_maps_are_scored_by_position_and_reported(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = OutOfDistribution("noise", 5 * torch.randn(20, 1, 6, 6), "made up")
    scores = evaluate(run, ood=strange)
    p = run.predict(run.data.test.inputs)
    assert isinstance(p, tb.ClassPredictive)
    targets = run.data.test.targets
    assert scores["accuracy"] == pytest.approx(float((p.prediction == targets).double().mean()))
    assert scores["mean_iou"] == pytest.approx(metrics.mean_iou(p.probs, targets))
    assert scores["nll"] == pytest.approx(-float(p.log_prob(targets).double().mean()), rel=1e-5)
    saved = Predictions.load(run.files.path / "predictions.npz")
    assert (saved.probs.shape, saved.positions) == ((60 * 36, 3), 36)
    table = calibrate(run).figures
    assert (table["fitted"], table["scored"]) == (30 * 36, 30 * 36)  # half of the pictures each
    kept = read_json(run.files.path / "calibration.json", "")
    assert kept.pop("made_with") == scored_with(run)
    assert kept == table
    page = write_report(run.files.path).read_text(encoding="utf-8")
    assert "Temperature" in page
    assert "mean IoU" in page
    monkeypatch.setattr(positions, "_MOST", 500)
    few = evaluate(run, ood=strange)
    assert len(Predictions.load(run.files.path / "predictions.npz").probs) == 500
    assert few["mean_iou"] == scores["mean_iou"]  # of all positions
    spread = np.sqrt(scores["accuracy"] * (1 - scores["accuracy"]) / 500)  # type: ignore[operator]
    assert few["accuracy"] == pytest.approx(scores["accuracy"], abs=4 * spread)
