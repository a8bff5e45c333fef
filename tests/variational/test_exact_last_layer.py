"""The exact last layer against NumPy, a Gaussian's density and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import torchbayes as tb


def problem(count: int = 80, outputs: int = 1) -> tuple[nn.Sequential, Tensor, Tensor, np.ndarray]:
    """A network, data, and the features that its last layer is given, with a column of ones."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, outputs)
    ).double()
    x = torch.randn(count, 3, dtype=torch.float64)
    y = 2 * x[:, :outputs].sin() + 0.4 * torch.randn(count, outputs, dtype=torch.float64)
    phi = model[:2](x).detach().numpy()
    return model, x, y, np.hstack([phi, np.ones((count, 1))])


def test_posterior_and_prediction_are_the_conjugate_ones() -> None:
    model, x, y, phi = problem(outputs=2)
    last = tb.variational.ExactLastLayer(model, (x, y), noise_std=0.5, prior=3.0)
    cov = np.linalg.inv(3.0 * np.eye(8) + phi.T @ phi / 0.25)
    mean = cov @ phi.T @ y.numpy() / 0.25
    q = last.posterior()
    found = np.c_[q.mean()["3.weight"].numpy(), q.mean()["3.bias"].numpy()]
    np.testing.assert_allclose(found, mean.T, rtol=1e-9)
    np.testing.assert_allclose(q._inputs["3.weight"] @ q._inputs["3.weight"].T, cov, rtol=1e-8)
    p = last.predictive(x)
    np.testing.assert_allclose(p.mean.numpy(), phi @ mean, rtol=1e-9)
    variance = np.einsum("nd,de,ne->n", phi, cov, phi)
    np.testing.assert_allclose(p.epistemic.numpy() ** 2, np.c_[variance, variance], rtol=1e-8)
    np.testing.assert_allclose(p.std.numpy() ** 2, np.c_[variance, variance] + 0.25, rtol=1e-8)
    # ln p(t) of the targets, whose covariance under prior and noise is ΦΦᵀ/α + 1/β.
    joint = torch.from_numpy(phi @ phi.T / 3.0 + 0.25 * np.eye(len(phi)))
    prior = torch.distributions.MultivariateNormal(torch.zeros(len(phi)).double(), joint)
    assert last.log_evidence == pytest.approx(float(prior.log_prob(y.t()).sum()), abs=1e-8)
    assert model.training  # the network is as it was
    assert not torch.equal(model[3].weight, q.mean()["3.weight"])


def test_evidence_chooses_what_scikit_learn_chooses() -> None:
    model, x, y, phi = problem()
    last = tb.variational.ExactLastLayer(model, (x, y))
    ridge = BayesianRidge(
        alpha_1=0, alpha_2=0, lambda_1=0, lambda_2=0, fit_intercept=False, max_iter=5000, tol=1e-12,
        compute_score=True,
    )  # fmt: skip
    ridge.fit(phi, y.numpy().ravel())
    assert last.prior_precision == pytest.approx(ridge.lambda_, rel=1e-5)
    assert last.noise_std**-2 == pytest.approx(ridge.alpha_, rel=1e-5)
    assert last.log_evidence == pytest.approx(ridge.scores_[-1], rel=1e-6)
    mean, std = ridge.predict(phi, return_std=True)
    p = last.predictive(x)
    np.testing.assert_allclose(p.mean.numpy().ravel(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(p.std.numpy().ravel(), std, rtol=1e-5)
    # Known noise: only the prior is chosen, and no other one has a larger evidence.
    known = tb.variational.ExactLastLayer(model, (x, y), noise_std=0.4)
    assert known.noise_std == pytest.approx(0.4)
    for factor in (0.9, 1.1):
        other = tb.variational.ExactLastLayer(
            model, (x, y), noise_std=0.4, prior=factor * known.prior_precision
        )
        assert other.log_evidence < known.log_evidence


def test_a_loader_gives_the_same_and_the_posterior_predicts() -> None:
    model, x, y, _ = problem()
    whole = tb.variational.ExactLastLayer(model, (x, y))
    parts = tb.variational.ExactLastLayer(model, [(x[:30], y[:30]), (x[30:], y[30:, 0])])
    assert parts.log_evidence == pytest.approx(whole.log_evidence)
    drawn = tb.predictive(
        model, whole.posterior(), x, 4000, likelihood=whole.likelihood,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    exact = whole.predictive(x)
    assert ((drawn.mean - exact.mean).abs() < 5 * exact.epistemic / 4000**0.5).all()
    assert ((drawn.epistemic / exact.epistemic - 1).abs() < 5 / 8000**0.5).all()


def test_refuses_what_it_cannot_take() -> None:
    model, x, y, _ = problem()
    with pytest.raises(ValueError, match=r"torch.int64: an exact last layer is a regression"):
        tb.variational.ExactLastLayer(model, (x, torch.zeros(80).long()))
    with pytest.raises(ValueError, match="noise_std is -1"):
        tb.variational.ExactLastLayer(model, (x, y), noise_std=-1.0)
    with pytest.raises(ValueError, match="fit the 5 targets exactly"):
        tb.variational.ExactLastLayer(model, (x[:5], model.eval()(x[:5]).detach()))
    with pytest.raises(ValueError, match="no examples"):
        tb.variational.ExactLastLayer(model, [])


def test_every_kind_of_data_gives_the_same() -> None:
    model, x, y, _ = problem()
    net = model.float()
    data = TensorDataset(x.float(), y.float())
    kinds = [
        (x.float(), y.float()), (x.float().numpy(), y.float().numpy()), (x, y), (x.numpy(), y.numpy()),
        {"input": x.float(), "labels": y.float()}, data, Subset(data, range(len(data))),
        DataLoader(data, 32),
    ]  # fmt: skip
    evidence = [tb.variational.ExactLastLayer(net, each).log_evidence for each in kinds]
    assert evidence == pytest.approx([evidence[0]] * len(kinds), rel=1e-5)
    last = tb.variational.ExactLastLayer(net, data)
    assert torch.equal(last.predictive(x.numpy()).mean, last.predictive(x.float()).mean)
    with pytest.raises(TypeError, match="cannot take a Tensor as training data"):
        tb.variational.ExactLastLayer(net, x)
    with pytest.raises(ValueError, match="weights of the examples, which an exact last layer"):
        tb.variational.ExactLastLayer(net, (x, y, torch.ones(len(x))))
