"""The scikit-learn estimators: scikit-learn's own checks, and what its users do with estimators."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

from torchbayes import BayesianClassifier, BayesianRegressor

# `map` with a high rate: the checks are of the interface, and there are hundreds of fits in them.
QUICK: dict[str, Any] = {"method": "map", "lr": 0.02, "epochs": 30, "random_state": 0}
# Checks that are expected to fail, with the reason.
EXPECTED: dict[str, str] = {}

CHECKS = [
    pytest.param(estimator, check, id=f"{type(estimator).__name__}-{check.func.__name__}")
    for made in (BayesianClassifier(**QUICK), BayesianRegressor(**QUICK))
    for estimator, check in estimator_checks_generator(made, legacy=True)
]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    if check.func.__name__ in EXPECTED:
        pytest.xfail(EXPECTED[check.func.__name__])
    check(estimator)


def moons() -> tuple[np.ndarray, np.ndarray]:
    X, y = make_moons(160, noise=0.1, random_state=0)
    return X, np.array(["down", "up"])[y]


def test_pipeline_grid_search_and_labels_that_are_words() -> None:
    X, y = moons()
    pipe = make_pipeline(StandardScaler(), BayesianClassifier(**QUICK))
    search = GridSearchCV(
        pipe, {"bayesianclassifier__epochs": [1, 60], "bayesianclassifier__lr": [0.02]}, cv=2
    ).fit(X, y)
    assert search.best_params_["bayesianclassifier__epochs"] == 60
    assert search.best_score_ > 0.9
    assert set(search.predict(X)) == {"down", "up"}
    assert cross_val_score(pipe, X, y, cv=2, scoring="neg_log_loss").mean() > -0.4


@pytest.mark.parametrize("method", ["ensemble", "bbb", "vogn", "sghmc", "swag"])
def test_any_method_pickles_and_clones(method: str) -> None:
    X, y = moons()
    net = BayesianClassifier(method=method, epochs=2, samples=4, random_state=1).fit(X, y)
    probs = net.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-5)
    again = pickle.loads(pickle.dumps(net))
    np.testing.assert_array_equal(again.predict_proba(X), probs)
    twin = clone(net).fit(X, y)
    np.testing.assert_allclose(twin.predict_proba(X), probs, rtol=1e-6)
    assert (net.predictive(X).epistemic >= 0).all()


def test_a_network_of_ones_own_is_trained_but_not_changed() -> None:
    X, y = make_moons(100, random_state=0)
    images = np.tile(X.astype(np.float32)[:, :, None, None], (1, 1, 4, 4))
    own = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    before = own[1].weight.detach().clone()
    net = BayesianClassifier(own, **QUICK).fit(images, y)
    assert net.score(images, y) > 0.8
    assert torch.equal(own[1].weight, before)
    made = BayesianClassifier(lambda: nn.Linear(2, 2), **QUICK).fit(X, y)
    assert made.run_.model.weight.dtype == torch.float32


def test_the_default_network_goes_by_the_shape() -> None:
    generator = np.random.default_rng(0)
    X, y = generator.standard_normal((20, 1, 16, 16)), np.arange(20) % 2
    net = BayesianClassifier(method="map", epochs=1).fit(X, y)
    assert any(isinstance(layer, nn.Conv2d) for layer in net.run_.model.modules())
    assert net.predict(X).shape == (20,)


def test_a_regressor_knows_its_noise_in_the_targets_unit() -> None:
    """y = 500 + 100 x with noise of 30, and far from the data less sure."""
    generator = np.random.default_rng(0)
    X = generator.uniform(-1, 1, (400, 1))
    y = 500 + 100 * X[:, 0] + 30 * generator.standard_normal(400)
    net = BayesianRegressor(method="ensemble", lr=0.01, epochs=30, random_state=0).fit(X, y)
    mean, std = net.predict(np.array([[0.0], [20.0]]), return_std=True)
    assert mean[0] == pytest.approx(500, abs=15)
    assert std[0] == pytest.approx(30, rel=0.25)
    assert std[1] > 1.5 * std[0]


def test_several_targets_keep_their_shape() -> None:
    generator = np.random.default_rng(0)
    X = generator.standard_normal((50, 3))
    Y = X @ np.array([[1.0, 10.0], [2.0, 0.0], [0.0, -30.0]])
    net = BayesianRegressor(**{**QUICK, "epochs": 100}).fit(X, Y)
    mean, std = net.predict(X, return_std=True)
    assert mean.shape == std.shape == (50, 2)
    assert net.score(X, Y) > 0.9


def test_an_option_that_is_none_is_named() -> None:
    X, y = moons()
    with pytest.raises(ValueError, match="no option"):
        BayesianClassifier(method="map", options={"larning": 1}).fit(X, y)
