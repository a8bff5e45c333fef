"""`verify` passes settings that are right and flags a wrong train size, for every method with a target."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import BayesianRidge
from typer.testing import CliRunner

import torchbayes as tb
from torchbayes.checks.conjugate import LinearRegression
from torchbayes.cli import app
from torchbayes.prior import resnetpp_prior
from torchbayes.train.registry import METHODS

SIZE = 400
SETTINGS: dict[str, dict[str, Any]] = {
    "sgld": {"lr": 5e-5, "epochs": 800},
    # Slow averaging: with the usual decay the preconditioner follows the chain.
    "psgld": {"lr": 1e-4, "epochs": 400, "decay": 0.9999},
    "sghmc": {"epochs": 250},
    # A thermostat that reacts within 0.1 / 0.05² = 40 updates.
    "sgnht": {"lr": 0.05, "average_step": 0.003, "epochs": 300},
    "atmc": {"lr": 0.05, "average_step": 0.003, "epochs": 300},
    "noisy-kfac": {"lr": 0.02, "epochs": 150, "damping": 0.0, "betas": (0.9, 0.02)},
    "vogn": {"lr": 0.02, "epochs": 150, "damping": 0.0, "betas": (0.9, 0.02)},
    "ivon": {"lr": 0.1, "epochs": 250, "betas": (0.9, 0.99), "initial_curvature": 1.0},
    "bbb": {"lr": 0.02, "epochs": 200, "init_std": 0.03},
    "vbll": {"lr": 0.02, "epochs": 100},
}


def test_points_averages_and_ensembles_have_no_exact_answer() -> None:
    assert all(METHODS[name].target is not None for name in SETTINGS)
    for name in (
        "map",
        "mle",
        "dropout",
        "ensemble",
        "swa",
        "swag",
        "hwa",
        "ogn",
        "kfac",
        "hypernet",
    ):
        assert METHODS[name].target is None


@pytest.mark.parametrize("method", list(SETTINGS))
def test_right_settings_are_trusted_and_a_wrong_train_size_is_flagged(method: str) -> None:
    common = {"train_size": SIZE, "batch_size": 100, **SETTINGS[method]}
    right = tb.verify(method, **common)
    assert right.trusted, right
    assert "can be trusted" in right.verdict
    wrong = tb.verify(method, told_size=10 * SIZE, **common)
    assert not wrong.trusted, wrong
    assert "train_size" in wrong.verdict


def test_too_small_a_train_size_is_flagged_as_too_wide() -> None:
    found = tb.verify("sghmc", train_size=SIZE, batch_size=100, told_size=SIZE // 10, epochs=250)
    assert not found.trusted
    # The variance is that of a tenth of the examples: √10 in the spread.
    assert found.std_ratio == pytest.approx(np.sqrt(10), rel=0.1)
    assert "too wide" in found.verdict


def test_damping_is_seen() -> None:
    """Damping is added to the curvature: one of its size makes the spread √2 too narrow."""
    common = {**SETTINGS["vogn"], "damping": 1.0}
    found = tb.verify("vogn", train_size=SIZE, batch_size=100, **common)
    assert not found.trusted
    assert "damping" in found.verdict


def test_the_problems_posterior_is_scikit_learns() -> None:
    problem = LinearRegression.make(200, 4, 3)
    ridge = BayesianRidge(fit_intercept=False, alpha_init=1.0, lambda_init=2.0, max_iter=1)
    # One iteration with flat hyperpriors updates α and λ once; coef_ is that of the initial ones.
    x, y = problem.inputs.double().numpy(), problem.targets.double().numpy()
    precision = x.T @ x + 2.0 * np.eye(4)
    np.testing.assert_allclose(problem.precision(2.0), precision, rtol=1e-10)
    for output in range(3):  # the same posterior for all
        exact = np.linalg.solve(precision, x.T @ y[:, output])
        np.testing.assert_allclose(problem.mean(2.0), exact, rtol=1e-5)
    ridge.fit(x, y[:, 0])
    assert np.abs(ridge.coef_ - problem.mean(2.0).numpy()).max() < 0.01
    # Per-example squared gradients at the solution are the curvature.
    weights = torch.linalg.lstsq(problem.inputs.double(), problem.targets.double()).solution
    residual = problem.targets.double() - problem.inputs.double() @ weights
    torch.testing.assert_close(residual.square(), torch.ones_like(residual), rtol=0, atol=1e-4)


def test_the_command_prints_json_and_says_no_by_its_exit_code() -> None:
    arguments = ["verify", "vogn", "--train-size", "400", "--batch-size", "100", "--lr", "0.02"]
    arguments += ["--epochs", "60", "--set", "damping=0.0", "--set", "betas=[0.9, 0.02]"]
    good = CliRunner().invoke(app, [*arguments, "--json"])
    assert good.exit_code == 0, good.output
    assert json.loads(good.stdout)["trusted"]
    bad = CliRunner().invoke(app, [*arguments, "--told-size", "40000"])
    assert bad.exit_code == 1
    assert "Do not trust these settings" in bad.stdout


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"method": "map", "train_size": 100}, "no exact answer"),
        ({"method": "sgld", "train_size": 4}, "at least 16"),
        ({"method": "sgld", "train_size": 100, "prior": resnetpp_prior()}, "needs N"),
        ({"method": "sgld", "train_size": 100, "epochs": 0}, "epochs is 0"),
        ({"method": "sgld", "train_size": 100, "larning": 1}, "no option"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tb.verify(**arguments)


def test_divergence_is_a_training_error() -> None:
    with pytest.raises(tb.TrainingError, match="smaller lr"):
        tb.verify("sgld", train_size=400, batch_size=100, epochs=100, lr=1.0)


def test_an_ill_conditioned_posterior_is_reported_by_direction() -> None:
    """With whole batches a sampler has every direction right; independent weights cannot."""
    found = tb.verify("sghmc", train_size=SIZE, batch_size=SIZE, condition=100.0)
    assert found.trusted, found
    assert len(found.directions) == 4
    assert all(0.9 < d < 1.1 for d in found.directions), found.directions
    assert "times as many updates" in found.limit
    problem = LinearRegression.make(SIZE, 4, 1, condition=100.0)
    widths = torch.linalg.eigvalsh(problem.precision(0.0))
    assert float(widths[-1] / widths[0]) == pytest.approx(100, rel=1e-3)


def test_what_independent_weights_cannot_do_is_said() -> None:
    settings = {**SETTINGS["vogn"], "epochs": 40, "batch_size": 100, "train_size": SIZE}
    assert tb.verify("vogn", **settings).limit == ""
    assert "cannot follow directions" in tb.verify("vogn", condition=100.0, **settings).limit
    with pytest.raises(ValueError, match=r"condition is 0\.5"):
        tb.verify("vogn", condition=0.5, **settings)
