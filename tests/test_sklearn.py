"""The scikit-learn estimators: scikit-learn's own checks, and what its users do with estimators."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm, t
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

import torchbayes as tb
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


def line(count: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """y = 500 + 100 x with noise of 30."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-1, 1, (count, 1))
    return X, 500 + 100 * X[:, 0] + 30 * generator.standard_normal(count)


def test_everything_of_a_regressor_is_in_the_units_of_y() -> None:
    X, y = line()
    net = BayesianRegressor(**{**QUICK, "epochs": 60}).fit(X, y)
    mean, std = net.predict(X, return_std=True)
    p = net.predictive(X)
    np.testing.assert_allclose(p.mean[:, 0].numpy(), mean)
    np.testing.assert_allclose(p.std[:, 0].numpy(), std)
    low, high = net.predict_interval(X, coverage=0.8)
    # MAP has one draw: its prediction is a Gaussian, whose quantiles SciPy knows.
    np.testing.assert_allclose(low, norm.ppf(0.1, mean, std), rtol=1e-5)
    np.testing.assert_allclose(high, norm.ppf(0.9, mean, std), rtol=1e-5)
    assert 0.7 < np.mean((low <= y) & (y <= high)) < 0.9
    found = net.predict_quantiles(X, (0.1, 0.5, 0.9))
    np.testing.assert_allclose(found, np.stack([low, mean, high], 1), rtol=1e-5)
    Y = np.stack([y, -y / 10], 1)
    net = BayesianRegressor(**QUICK).fit(X, Y)
    low, high = net.predict_interval(X)
    assert low.shape == (300, 2)
    assert net.predict_quantiles(X, [0.5]).shape == (300, 2, 1)
    np.testing.assert_allclose(net.predictive(X).mean.mean(0).numpy(), Y.mean(0), rtol=0.1)
    with pytest.raises(ValueError, match="coverage is 90: expected between 0 and 1"):
        net.predict_interval(X, 90)


def test_likelihoods() -> None:
    X, y = line()
    # A fixed level is in the units of y.
    fixed = BayesianRegressor(**QUICK, likelihood=tb.GaussianNoise(40.0)).fit(X, y)
    np.testing.assert_allclose(fixed.predict(X, return_std=True)[1], 40, rtol=1e-5)
    two = BayesianRegressor(**QUICK, likelihood=tb.GaussianNoise(40.0)).fit(
        X, np.stack([y, 9 * y], 1)
    )
    np.testing.assert_allclose(two.predict(X, return_std=True)[1], 40, rtol=1e-5)
    # Outliers move the heavy-tailed one less.
    dirty = y.copy()
    dirty[::10] += 3000
    quick = {**QUICK, "epochs": 60}
    robust = BayesianRegressor(**quick, likelihood=tb.StudentT(3.0, learned=True)).fit(X, dirty)
    plain = BayesianRegressor(**quick).fit(X, dirty)
    truth = 500 + 100 * X[:, 0]
    assert np.abs(robust.predict(X) - truth).mean() < 0.3 * np.abs(plain.predict(X) - truth).mean()
    mean, std = robust.predict(X, return_std=True)
    scale, df = std / np.sqrt(robust.run_.likelihood.df.item()), 3.0  # std = scale √(df / (df − 2))
    np.testing.assert_allclose(
        robust.predict_quantiles(X, [0.9])[:, 0], t.ppf(0.9, df, mean, scale), rtol=1e-4
    )
    # Noise that grows with the input.
    wide = 500 + (5 + 45 * (X[:, 0] > 0)) * np.random.default_rng(1).standard_normal(300)
    net = BayesianRegressor(**quick, likelihood=tb.GaussianNoise(predicted=True)).fit(X, wide)
    low, high = net.predict_interval(np.array([[-0.5], [0.5]]))
    assert (high - low)[1] > 3 * (high - low)[0]
    # Counts are not standardised.
    counts = np.random.default_rng(1).poisson(np.exp(1 + X[:, 0]))
    net = BayesianRegressor(**quick, likelihood=tb.Poisson()).fit(X, counts)
    np.testing.assert_allclose(net.predict(X), np.exp(1 + X[:, 0]), rtol=0.4)
    assert set(np.unique(net.predict_interval(X)[1] % 1)) == {0.0}
    labels = (y > 500).astype(int)
    net = BayesianClassifier(**QUICK, likelihood=tb.Bernoulli()).fit(X, labels)
    assert net.run_.model(torch.zeros(1, 1).double()).shape == (1, 1)
    assert net.predict_proba(X).shape == (300, 2)
    with pytest.raises(ValueError, match="use BayesianClassifier"):
        BayesianRegressor(**QUICK, likelihood=tb.Bernoulli()).fit(X, labels).predict(X)


def test_weights_of_examples_and_classes() -> None:
    X, y = make_moons(100, noise=0.3, random_state=0)
    net = BayesianClassifier(**QUICK).fit(X, y, sample_weight=np.where(y == 1, 20.0, 1.0))
    twin = BayesianClassifier(**QUICK, class_weight={1: 20.0}).fit(X, y)
    np.testing.assert_allclose(net.predict_proba(X), twin.predict_proba(X), rtol=1e-6)
    plain = BayesianClassifier(**QUICK).fit(X, y)
    assert net.predict_proba(X)[:, 1].mean() > plain.predict_proba(X)[:, 1].mean() + 0.05
    assert net.run_.settings["train_size"] == 50 * 21
    weighted = net.score(X, y, sample_weight=np.where(y == 1, 20.0, 1.0))
    assert weighted == pytest.approx(np.average(net.predict(X) == y, weights=1 + 19 * y))
    few = np.r_[np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:5]]
    balanced = BayesianClassifier(**QUICK, class_weight="balanced").fit(X[few], y[few])
    by_hand = np.where(y[few] == 1, 55 / (2 * 5), 55 / (2 * 50))
    twin = BayesianClassifier(**QUICK).fit(X[few], y[few], sample_weight=by_hand)
    np.testing.assert_allclose(balanced.predict_proba(X), twin.predict_proba(X), rtol=1e-6)
    for bad, match in (
        (np.zeros(100), "every weight in sample_weight is 0|at least one non-zero"),
        (1.0 * y, "only the class .*1.* has examples with a weight above 0"),
        (np.full(100, -1.0), "(?i)negative"),
    ):
        with pytest.raises(ValueError, match=match):
            BayesianClassifier(**QUICK).fit(X, y, sample_weight=bad)
    with pytest.raises(ValueError, match="class_weight has the class 7, which y does not have"):
        BayesianClassifier(**QUICK, class_weight={7: 2.0}).fit(X, y)


def test_a_regressors_weights_are_repetitions() -> None:
    X, y = line(30)
    times = np.arange(30) % 3
    net = BayesianRegressor(**QUICK).fit(X, y, sample_weight=times)
    twin = BayesianRegressor(**QUICK).fit(np.repeat(X, times, 0), np.repeat(y, times))
    for one, other in zip(net.predict(X, True), twin.predict(X, True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("method", ["map", "ensemble", "vogn", "sgld"])
def test_partial_fit_goes_on_from_the_weights_that_are_there(method: str) -> None:
    X, y = moons()
    net = BayesianClassifier(method=method, random_state=0, samples=4)
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        net.partial_fit(X, y)
    net.partial_fit(X[:80], y[:80], classes=["down", "up"])
    before = net.run_.posterior
    net.lr, net.batch_size = 1e-12, 80  # one tiny step: the weights stay where they are
    net.partial_fit(X[80:], y[80:])
    assert net.run_.settings["train_size"] == 160
    if method == "ensemble":
        assert len(net.run_.posterior) == len(before) == 5
        pairs = zip(before, net.run_.posterior, strict=True)
    else:
        pairs = [(before[-1], net.run_.posterior[-1])] if method == "sgld" else []
        pairs += [(before.mean(), net.run_.posterior.mean())] if method in ("map", "vogn") else []
    for one, other in pairs:
        for name, weights in one.items():
            torch.testing.assert_close(other[name], weights, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"y has the class .*sideways.*, which is not among"):
        net.partial_fit(X[:2], np.array(["up", "sideways"]))


def test_partial_fit_learns_in_parts() -> None:
    X, y = moons()
    net = BayesianClassifier(method="map", lr=0.02, random_state=0)
    for _ in range(60):
        net.partial_fit(X[::2], y[::2], ["down", "up"]).partial_fit(X[1::2], y[1::2])
    assert net.score(X, y) > 0.9
    X, y = line()
    reg = BayesianRegressor(method="map", lr=0.02, random_state=0)
    for _ in range(30):
        reg.partial_fit(X, y)
    assert reg.predict(X, return_std=True)[1].mean() == pytest.approx(30, rel=0.3)
    with pytest.raises(ValueError, match="y has 2 targets per example, but 1 in the first call"):
        reg.partial_fit(X, np.stack([y, y], 1))


def test_a_few_rows_get_as_many_updates_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        """What `fit` was asked for; it need not be done."""

    def noted(*_: Any, **how: Any) -> None:
        raise Asked(how["epochs"])

    monkeypatch.setattr("torchbayes.sklearn.base.fit", noted)
    X = np.zeros((3000, 1))
    for rows, given, expected in ((277, None, 400), (3000, None, 100), (277, 3, 3)):
        with pytest.raises(Asked, match=f"^{expected}$"):
            BayesianRegressor(epochs=given).fit(X[:rows], X[:rows, 0])


def test_an_option_that_is_none_is_named() -> None:
    X, y = moons()
    with pytest.raises(ValueError, match="no option"):
        BayesianClassifier(method="map", options={"larning": 1}).fit(X, y)
