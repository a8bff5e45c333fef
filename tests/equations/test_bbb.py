"""Bayes by Backprop's gradients of μ and ρ against a NumPy transcription of the paper's formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.variational import MeanField, shared_draw
from torchbayes.variational.estimators import Estimator

TRAIN_SIZE = 50


class DrawnGaussianPrior(tb.GaussianPrior):
    """The same density, but as a subclass it could be any: it takes the path of an unknown prior."""


class DrawnMixturePrior(tb.ScaleMixturePrior):
    """Likewise."""


class Recorder(nn.Linear):
    """A linear layer that notes the weight it was called with."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.weight.detach().numpy().copy()
        return super().forward(inputs)


def network(prior: tb.Prior, estimator: Estimator = shared_draw) -> MeanField:
    torch.manual_seed(0)
    net = MeanField(
        Recorder(4, 3, bias=False).double(),
        prior,
        estimator,
        init_std=0.3,
        generator=torch.Generator().manual_seed(1),
    )
    with torch.no_grad():
        net.rho.weight += 0.5 * torch.randn_like(net.rho.weight)
    return net


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((7, 4)), rng.standard_normal((7, 3))


def log_prior_gradient(prior: tb.Prior, w: np.ndarray) -> np.ndarray:
    """d log P(w) / dw."""
    if isinstance(prior, tb.GaussianPrior):
        return -prior.precision * (w - prior.mean)
    a = prior.pi / prior.std1 * np.exp(-0.5 * w**2 / prior.std1**2)
    b = (1 - prior.pi) / prior.std2 * np.exp(-0.5 * w**2 / prior.std2**2)
    return -(a * w / prior.std1**2 + b * w / prior.std2**2) / (a + b)


def likelihood_gradient(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """d (−log P(D|w)) / dw for unit Gaussian noise, of the whole training set by one minibatch."""
    return TRAIN_SIZE / len(x) * (x @ w.T - y).T @ x


@pytest.mark.parametrize(
    "prior",
    [
        tb.ScaleMixturePrior(pi=0.25, std1=1.0, std2=0.1),
        DrawnMixturePrior(pi=0.25, std1=1.0, std2=0.1),
        DrawnGaussianPrior(mean=0.2, precision=3.0),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_gradients_of_a_drawn_kl_are_the_papers(prior: tb.Prior) -> None:
    net = network(prior)
    x, y = data()
    outputs = net(torch.from_numpy(x))
    nll = 0.5 * (outputs - torch.from_numpy(y)).square().sum() / len(x)
    (nll + net.kl() / TRAIN_SIZE).backward()

    mu, rho = (p.detach().numpy() for p in (net.model.weight, net.rho.weight))
    w = net.model.seen
    sigma = np.log1p(np.exp(rho))
    epsilon = (w - mu) / sigma
    # f(w, θ) = log q(w|θ) − log P(w) − log P(D|w) and its partial derivatives
    f_w = -(w - mu) / sigma**2 - log_prior_gradient(prior, w) + likelihood_gradient(x, y, w)
    f_mu = (w - mu) / sigma**2
    f_rho = (-1 / sigma + (w - mu) ** 2 / sigma**3) / (1 + np.exp(-rho))
    delta_mu = f_w + f_mu
    delta_rho = f_w * epsilon / (1 + np.exp(-rho)) + f_rho
    np.testing.assert_allclose(TRAIN_SIZE * net.model.weight.grad, delta_mu, rtol=1e-9)
    np.testing.assert_allclose(TRAIN_SIZE * net.rho.weight.grad, delta_rho, rtol=1e-9)


def test_gradients_of_the_exact_kl() -> None:
    net = network(tb.GaussianPrior(mean=0.2, precision=3.0))
    x, y = data()
    nll = 0.5 * (net(torch.from_numpy(x)) - torch.from_numpy(y)).square().sum() / len(x)
    (nll + net.kl() / TRAIN_SIZE).backward()
    mu, rho = (p.detach().numpy() for p in (net.model.weight, net.rho.weight))
    w, sigma = net.model.seen, np.log1p(np.exp(rho))
    g = likelihood_gradient(x, y, w)
    delta_mu = g + 3.0 * (mu - 0.2)
    delta_rho = (g * (w - mu) / sigma + 3.0 * sigma - 1 / sigma) / (1 + np.exp(-rho))
    np.testing.assert_allclose(TRAIN_SIZE * net.model.weight.grad, delta_mu, rtol=1e-9)
    np.testing.assert_allclose(TRAIN_SIZE * net.rho.weight.grad, delta_rho, rtol=1e-9)


def test_value_of_a_drawn_kl_is_the_papers() -> None:
    prior = tb.ScaleMixturePrior(pi=0.25, std1=1.0, std2=0.1)
    net = network(prior)
    net(torch.zeros(1, 4, dtype=torch.float64))
    mu, sigma = net.model.weight.detach(), net.std()["weight"]
    w = torch.from_numpy(net.model.seen)
    log_q = torch.distributions.Normal(mu, sigma).log_prob(w).sum()
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.tensor([0.25, 0.75], dtype=torch.float64)),
        torch.distributions.Normal(
            torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64)
        ),
    )
    torch.testing.assert_close(net.kl(), log_q - mixture.log_prob(w).sum())
