"""skorch: optimisers that take the module first, predictions over the posterior, scikit-learn's habits."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import nn

import torchbayes as tb

skorch = pytest.importorskip("skorch")

from torchbayes.integrations.skorch import (  # noqa: E402
    BayesianNetClassifier,
    BayesianNetMixin,
    BayesianNetRegressor,
)

N = 120
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def mlp(outputs: int = 2, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(3, 8), middle, nn.Linear(8, outputs))


def classifier(**options: Any) -> Any:
    settings: dict[str, Any] = {
        "optimizer": tb.IVON, "lr": 0.3, "max_epochs": 6, "batch_size": 24, "verbose": 0,
        "iterator_train__shuffle": False, "train_split": None,
    }  # fmt: skip
    return BayesianNetClassifier(mlp, **(settings | options))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("method", [tb.IVON, tb.VOGN, tb.SGLD, tb.MAP])
def test_it_is_the_training_of_a_loop_by_hand(method: Any) -> None:
    options = {} if method is tb.MAP else {"optimizer__generator": seeded()}
    net = classifier(optimizer=method, lr=None, **options).fit(X, Y)
    model = mlp()
    hand = {} if method is tb.MAP else {"generator": seeded()}
    optimizer, bank = method(model, train_size=N, **hand), tb.Samples(model)
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    for epoch in range(6):
        for rows in torch.arange(N).split(24):

            def closure(rows: Any = rows) -> Any:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                return loss

            optimizer.step(closure)
            if epoch >= 3:
                bank.append()
    wanted = bank if method is tb.SGLD else optimizer.posterior()
    if method is tb.SGLD:
        assert len(net.posterior_) == 15
    mean = wanted.mean()
    assert all(torch.equal(v, mean[k]) for k, v in net.posterior_.mean().items())


def test_probabilities_average_over_the_posterior() -> None:
    net = classifier(optimizer=tb.SGLD, lr=1e-3).fit(X, Y)
    model, probs = mlp().eval(), []
    for draw in net.posterior_:
        model.load_state_dict(draw)
        probs.append(model(torch.from_numpy(X)).softmax(1).detach())
    found = net.predict_proba(X)
    np.testing.assert_allclose(found, torch.stack(probs).mean(0), rtol=1e-5, atol=1e-6)
    assert (net.predict(X) == found.argmax(1)).all()
    assert net.predictive(X).epistemic.shape == (N,)


def test_it_learns_and_gives_the_same_answer_twice() -> None:
    net = classifier(max_epochs=40).fit(X, Y)
    assert net.score(X, Y) > 0.95
    assert (net.predict_proba(X) == net.predict_proba(X)).all()


def test_held_out_examples_do_not_count_and_callbacks_score_while_it_trains() -> None:
    net = classifier(train_split=skorch.dataset.ValidSplit(4), optimizer=tb.SGLD, lr=1e-3)
    net.fit(X, Y)
    assert net.optimizer_.param_groups[0]["train_size"] == 90
    assert all(0 <= row["valid_acc"] <= 1 for row in net.history)


def test_a_default_learning_rate_knows_the_number_of_examples() -> None:
    """SGLD's is 0.2/train_size, also if the net was initialised before there were data."""
    rates = []
    for net in (
        classifier(optimizer=tb.SGLD, lr=None),
        classifier(optimizer=tb.SGLD, lr=None).initialize(),
    ):
        net.partial_fit(X, Y)
        rates.append(net.optimizer_.param_groups[0]["lr"])
    assert rates == [0.2 / N] * 2


def test_averages_and_batch_norm() -> None:
    net = classifier(
        module__norm=True, optimizer=torch.optim.SGD, lr=0.1, averager=partial(tb.SWAG, rank=2),
        burn_in=0.0,
    ).fit(X, Y)  # fmt: skip
    assert isinstance(net.posterior_, tb.LowRankGaussian)
    mean = net.posterior_.mean()
    hidden = F.linear(torch.from_numpy(X), mean["0.weight"], mean["0.bias"])
    torch.testing.assert_close(mean["1.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-5)


def test_grid_search_clones_and_pickles() -> None:
    search = GridSearchCV(classifier(max_epochs=2), {"lr": [0.1, 0.3], "samples": [4]}, cv=2)
    search.fit(X, Y)
    assert search.best_params_["lr"] in (0.1, 0.3)
    net = search.best_estimator_
    again = pickle.loads(pickle.dumps(net))
    assert (again.predict_proba(X) == net.predict_proba(X)).all()
    copy = clone(net)
    assert (copy.samples, copy.lr, copy.optimizer) == (4, net.lr, tb.IVON)


class Binary(BayesianNetMixin, skorch.NeuralNetBinaryClassifier):
    pass


def test_other_nets_take_the_mixin() -> None:
    net = Binary(mlp, module__outputs=1, lr=0.3, max_epochs=40, batch_size=24, verbose=0)
    net.fit(X, Y.astype("float32"))
    assert net.predict_proba(X).shape == (N, 2)
    assert (net.predict(X) == Y).mean() > 0.9


def test_a_regression_learns_its_noise() -> None:
    rng = np.random.default_rng(1)
    y = (X @ [1.0, -2.0, 0.5] + 0.3 * rng.normal(size=N)).astype("float32")
    settings: dict[str, Any] = {
        "module__outputs": 1, "optimizer": tb.MAP, "lr": 0.01, "max_epochs": 200, "batch_size": 30,
        "verbose": 0, "train_split": None,
    }  # fmt: skip
    torch.manual_seed(0)
    net = BayesianNetRegressor(mlp, **settings).fit(X, y)
    # The noise is 0.3, of which the network's 41 weights fit a part.
    assert 0.2 < net.criterion_.std.item() < 0.35
    chain = BayesianNetRegressor(mlp, **(settings | {"optimizer": tb.SGHMC, "lr": None})).fit(X, y)
    mean, std = chain.predict(X, return_std=True)
    assert mean.shape == std.shape == (N, 1)
    assert (chain.predict(X) == mean).all()
    assert np.sqrt(np.mean((mean[:, 0] - y) ** 2)) < 0.4
    assert (np.abs(mean[:, 0] - y) < 2 * std[:, 0]).mean() > 0.9
    fixed = BayesianNetRegressor(
        mlp, criterion=tb.GaussianNoise(0.3), **(settings | {"max_epochs": 2})
    )
    assert fixed.fit(X, y[:, None]).criterion_.std.item() == pytest.approx(0.3)


def test_what_is_no_likelihood_says_what_to_use() -> None:
    with pytest.raises(ValueError, match="does not say how large the noise is"):
        BayesianNetRegressor(mlp, module__outputs=1, criterion=nn.MSELoss).fit(X, X[:, :1])
    with pytest.raises(ValueError, match=r"torchbayes.Categorical\(\)"):
        classifier(criterion=nn.NLLLoss).fit(X, Y)
    with pytest.raises(skorch.exceptions.NotInitializedError):
        _ = classifier().posterior_
