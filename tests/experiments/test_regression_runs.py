"""Regression from the command line: data, noise, scores, the picture and what refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import torchbayes as tb
from torchbayes.cli import app
from torchbayes.data import load_data
from torchbayes.experiments.saved_predictions import RegressionPredictions
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment
from torchbayes.likelihood import GaussianNoise
from torchbayes.report import write_report
from torchbayes.train.run_folder import RunError

SMALL = ["--model-set", "hidden=[16]", "--epochs", "3", "--samples", "4"]


def train(folder: Path, *extra: str) -> dict[str, float]:
    result = CliRunner().invoke(
        app, ["train", "--data", "bbb-curve", *SMALL, *extra, "--out", str(folder), "--json"]
    )
    assert result.exit_code == 0, result.output
    scores: dict[str, float] = json.loads(result.stdout)
    return scores


@pytest.mark.parametrize("method", ["bbb", "ensemble", "vogn", "sgld"])
def test_train_scores_and_draws_a_regression(method: str, tmp_path: Path) -> None:
    options = ["--set", "lr=0.00001"] if method == "sgld" else []
    scores = train(tmp_path / "run", "--method", method, *options)
    assert {"rmse", "nll", "crps", "coverage50", "coverage90", "auroc_ood"} <= scores.keys()
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run" / "predictions.npz").exists()


def test_scores_are_those_of_the_saved_predictions(tmp_path: Path) -> None:
    """Against NumPy and SciPy: a mixture of Gaussians over the draws."""
    scores = train(tmp_path / "run", "--method", "bbb", "--setting", "noise=predicted")
    saved = RegressionPredictions.load(tmp_path / "run" / "regression.npz")
    means, stds = (t.double().numpy()[:, :, 0] for t in (saved.means, saved.stds))
    targets = saved.targets.double().numpy()[:, 0]
    np.testing.assert_allclose(targets, load_data("bbb-curve").test.targets[:, 0])
    rmse = math.sqrt(np.mean((means.mean(0) - targets) ** 2))
    assert scores["rmse"] == pytest.approx(rmse, rel=1e-5)
    density = stats.norm.pdf(targets, means, stds).mean(0)
    assert scores["nll"] == pytest.approx(-np.log(density).mean(), rel=1e-5)
    below = stats.norm.cdf(targets, means, stds).mean(0)
    for share in (50, 90):
        inside = np.abs(below - 0.5) <= share / 200
        assert scores[f"coverage{share}"] == pytest.approx(inside.mean(), abs=1e-9)


def test_noise_is_learned_and_comes_back_with_the_run(tmp_path: Path) -> None:
    data = load_data("bbb-curve")
    experiment = Experiment(
        data="bbb-curve", method="map", epochs=30, samples=1, noise_std=0.5, options={"lr": 0.01}
    )
    run = train_experiment(experiment, tmp_path / "run", data=data, progress=False)
    assert isinstance(run.likelihood, GaussianNoise)
    learned = float(run.likelihood.std.detach())
    assert 0.02 < learned < 0.2  # the curve's noise: 0.02 times a slope of 0 to 6.7
    trained = TrainedRun(tmp_path / "run")
    noise = trained.likelihood()
    assert isinstance(noise, GaussianNoise)
    assert float(noise.std.detach()) == learned
    p = trained.predict(torch.zeros(3, 1))
    torch.testing.assert_close(p.aleatoric, torch.full((3, 1), learned))
    # A folder of an older version has the level in its checkpoint alone.
    (tmp_path / "run" / "likelihood.safetensors").unlink()
    older = TrainedRun(tmp_path / "run").likelihood()
    assert isinstance(older, GaussianNoise)
    assert float(older.std.detach()) == learned
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match="holds the learned noise level"):
        trained.likelihood()


def test_predicted_noise_has_two_outputs_and_fixed_noise_is_what_was_asked_for() -> None:
    data = load_data("bbb-curve")
    assert (data.num_classes, data.num_targets) == (0, 1)
    assert load_data("digits").num_targets == 0
    wide = Experiment(data="bbb-curve", noise="predicted").model_factory(data)()
    assert wide(torch.zeros(2, 1)).shape == (2, 2)
    fixed = Experiment(data="bbb-curve", noise="fixed", noise_std=0.3).likelihood(data)
    assert isinstance(fixed, GaussianNoise)
    assert not fixed.learned
    assert float(fixed.std.detach()) == pytest.approx(0.3)
    assert isinstance(Experiment().likelihood(load_data("digits")), tb.Categorical)


@pytest.mark.parametrize(
    ("setting", "match"), [("noise=loud", "learned or fixed"), ("noise_std=0", "above 0")]
)
def test_bad_noise_is_refused(setting: str, match: str) -> None:
    name, value = setting.split("=")
    with pytest.raises(ValueError, match=match):
        Experiment.from_settings({name: value if name == "noise" else float(value)}, "here")


def test_prune_and_predict_say_that_they_are_for_classifiers(tmp_path: Path) -> None:
    train(tmp_path / "run", "--method", "bbb")
    result = CliRunner().invoke(app, ["prune", str(tmp_path / "run")])
    assert isinstance(result.exception, ValueError)
    assert "is a regression" in str(result.exception)


def test_compare_and_its_page_take_a_regression(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["compare", "--data", "bbb-curve", "--methods", "map,bbb", *SMALL, "--out", str(tmp_path)],
    )
    assert result.exit_code == 0, result.output
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "bbb-curve" in page
