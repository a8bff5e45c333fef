"""The variational last layer: its bounds against Monte Carlo and NumPy, its posterior, its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.posterior import RowGaussian
from torchbayes.variational.last_layer import (
    categorical_bound,
    gaussian_bound,
    predicted_noise_bound,
)

RANKS = pytest.mark.parametrize("rank", [7, 0, 2])


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def trained(rank: int, likelihood: tb.Likelihood, outputs: int = 3) -> tb.VBLL:
    """A last layer whose covariance is nothing special."""
    net = tb.VBLL(network(outputs), likelihood.double(), train_size=50, rank=rank)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in (net.log_std, *([net.factor] if rank != 0 else [])):
            p.add_(0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


def covariances(net: tb.VBLL) -> np.ndarray:
    """S_k of every output, written out in NumPy from the parameters."""
    std = np.exp(net.log_std.detach().numpy())
    found = []
    for k, sigma in enumerate(std):
        root = np.diag(sigma)
        if net.dense:
            root = root @ (np.eye(len(sigma)) + np.tril(net.factor.detach().numpy()[k], -1))
        elif net.rank:
            root = root @ np.hstack([np.eye(len(sigma)), net.factor.detach().numpy()[k]])
        found.append(root @ root.T)
    return np.stack(found)


def features(net: tb.VBLL, x: Tensor) -> np.ndarray:
    phi = net.model[:2](x).detach().numpy()  # type: ignore[index]
    return np.hstack([phi, np.ones((len(phi), 1))])


def inputs(count: int = 5) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@RANKS
def test_moments_are_those_of_the_gaussian_weights(rank: int) -> None:
    net, x = trained(rank, tb.Categorical()), inputs()
    mean, variance = net.moments(x)
    phi = features(net, x)
    torch.testing.assert_close(mean, net.model(x))
    expected = np.einsum("nd,kde,ne->nk", phi, covariances(net), phi)
    np.testing.assert_allclose(variance.detach().numpy(), expected, rtol=1e-10)


def test_bound_of_predicted_noise_is_the_expectation() -> None:
    """E[log N(y | z, e^{2s})] over independent z and s, by Gauss–Hermite quadrature in NumPy."""
    mean, std, y = np.array([0.3, -0.7]), np.array([0.8, 0.4]), 1.1
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z, s = mean[0] + std[0] * nodes[:, None], mean[1] + std[1] * nodes[None]
    values = -s - 0.5 * ((y - z) / np.exp(s)) ** 2 - 0.5 * np.log(2 * np.pi)
    expected = (weights[:, None] * weights[None] * values).sum() / (2 * np.pi)
    found = predicted_noise_bound(
        torch.from_numpy(mean[None]),
        torch.from_numpy(std[None] ** 2),
        torch.tensor([[y]], dtype=torch.float64),
    )
    np.testing.assert_allclose(found.numpy(), [expected], rtol=1e-10)


def test_predicted_noise_is_learned_and_predicted() -> None:
    """Noise of 0.1 on one side and 1 on the other, which only a predicted level can tell apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(600, 1, generator=generator) * 2 - 1
    y = torch.where(x < 0, 0.1, 1.0) * torch.randn(600, 1, generator=generator)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
    run = tb.fit(
        model, (x, y), "vbll", likelihood=tb.GaussianNoise(predicted=True), epochs=60,
        batch_size=32, lr=0.01, progress=False,
    )  # fmt: skip
    p = run.predict(torch.tensor([[-0.7], [0.7]]), generator=generator)
    low, high = (p.quantile(0.95) - p.quantile(0.05)).flatten().tolist()
    assert 0.25 < low < 0.6  # 2 · 1.645 · 0.1 = 0.33
    assert 2.5 < high < 4.5  # 3.3


@RANKS
def test_kl_is_the_one_between_full_gaussians(rank: int) -> None:
    net = trained(rank, tb.Categorical())
    net.prior = tb.GaussianPrior(precision=3.0)
    last = net.model[2]  # type: ignore[index]
    means = torch.cat([last.weight, last.bias.unsqueeze(1)], 1).detach()
    size = means.shape[1]
    prior = torch.distributions.MultivariateNormal(
        torch.zeros(size).double(), torch.eye(size).double() / 3
    )
    expected = sum(
        torch.distributions.kl_divergence(
            torch.distributions.MultivariateNormal(mean, torch.from_numpy(cov)), prior
        )
        for mean, cov in zip(means, covariances(net), strict=True)
    )
    torch.testing.assert_close(net.kl().detach(), expected, rtol=1e-9, atol=0)


@RANKS
def test_posterior_has_the_same_gaussian(rank: int) -> None:
    """Draws of the posterior have the covariance of every output; outputs are independent."""
    net = trained(rank, tb.Categorical())
    q, generator = net.posterior(), torch.Generator().manual_seed(3)
    assert type(q) is RowGaussian
    draws = [q.sample(generator) for _ in range(4000)]
    rows = np.stack([np.c_[d["2.weight"].numpy(), d["2.bias"].numpy()] for d in draws])
    centre = np.c_[q.mean()["2.weight"].numpy(), q.mean()["2.bias"].numpy()]
    flat = (rows - centre).reshape(len(rows), -1)
    found = flat.T @ flat / len(flat)
    expected = np.zeros_like(found)
    for k, cov in enumerate(covariances(net)):
        part = slice(k * len(cov), (k + 1) * len(cov))
        expected[part, part] = cov
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs(found - expected).max() < 6 * (scale * np.sqrt(2 / len(draws))).max()
    assert (np.abs(found - expected) < 6 * scale * np.sqrt(2 / len(draws))).all()
    std = q.std()
    np.testing.assert_allclose(
        np.c_[std["2.weight"].numpy(), std["2.bias"].numpy()].ravel() ** 2, np.diag(expected)
    )
    torch.testing.assert_close(draws[0]["0.weight"], net.model[0].weight)  # type: ignore[index]


def test_regression_bound_is_the_expected_log_likelihood() -> None:
    generator = torch.Generator().manual_seed(4)
    mean, y = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    std = torch.tensor(0.7, dtype=torch.float64)
    # Gauss–Hermite quadrature is exact for the quadratic log-density.
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    expected = torch.zeros(4, dtype=torch.float64)
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        z = mean + variance.sqrt() * node
        expected += weight * torch.distributions.Normal(z, std).log_prob(y).sum(1)
    torch.testing.assert_close(gaussian_bound(mean, variance, y, std), expected)


def test_class_bound_is_below_the_expected_log_likelihood_and_tight_without_spread() -> None:
    generator = torch.Generator().manual_seed(5)
    mean = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    variance = 2 * torch.rand(6, 4, generator=generator, dtype=torch.float64)
    y = torch.arange(6) % 4
    draws = mean + variance.sqrt() * torch.randn(20_000, 6, 4, generator=generator).double()
    terms = -F.cross_entropy(draws.flatten(0, 1), y.repeat(20_000), reduction="none")
    terms = terms.reshape(20_000, 6)
    error = terms.std(0) / 20_000**0.5
    bound = categorical_bound(mean, variance, y)
    assert (bound < terms.mean(0) + 4 * error).all()
    assert (bound < terms.mean(0) - 4 * error).any()  # a bound, not an estimate
    numpy = mean.numpy()
    expected = numpy[np.arange(6), y] - np.log(np.exp(numpy + variance.numpy() / 2).sum(1))
    np.testing.assert_allclose(bound.numpy(), expected)
    exact = -F.cross_entropy(mean, y, reduction="none")
    torch.testing.assert_close(categorical_bound(mean, torch.zeros_like(mean), y), exact)


def test_loss_is_in_the_one_scale() -> None:
    net, x = trained(7, tb.GaussianNoise(0.5), outputs=1), inputs()
    y = torch.ones(5, 1, dtype=torch.float64)
    mean, variance = net.moments(x)
    nll = 0.5 * np.log(2 * np.pi * 0.25) + ((y - mean) ** 2 + variance) / 0.5
    before = torch.cat([p.flatten() for p in net.model[0].parameters()])  # type: ignore[index]
    expected = nll.mean() + (net.kl() + before.square().sum() / 2) / 50
    torch.testing.assert_close(net.loss(x, y), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(net.loss(x, y.squeeze(1)), expected, rtol=1e-7, atol=0)


def test_on_frozen_features_it_converges_to_the_exact_posterior() -> None:
    """The bound's maximum over all Gaussians is the conjugate posterior."""
    torch.manual_seed(0)
    x = inputs(60)
    y = x[:, :1] + 0.3 * torch.randn(60, 1).double()
    model = network(1)
    model[0].requires_grad_(False)
    exact = tb.variational.ExactLastLayer(model, (x, y), noise_std=0.3, prior=2.0)
    net = tb.VBLL(model, tb.GaussianNoise(0.3), train_size=60, prior=2.0)
    optimizer = torch.optim.LBFGS(
        [p for p in net.parameters() if p.requires_grad], max_iter=800, tolerance_grad=1e-10,
        tolerance_change=0, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net.loss(x, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    new = inputs(8) * 2
    ours, theirs = net.predictive(new), exact.predictive(new)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.epistemic, theirs.epistemic, rtol=1e-4, atol=0)
    # The loss at the optimum is the negative evidence: the bound is tight.
    assert 60 * net.loss(x, y).item() == pytest.approx(-exact.log_evidence, abs=1e-5)


@RANKS
def test_closed_form_prediction_agrees_with_draws_of_the_weights(rank: int) -> None:
    net, x = trained(rank, tb.GaussianNoise(0.5), outputs=2), inputs()
    exact = net.predictive(x)
    drawn = tb.predictive(
        net, net.posterior(), x, 4000, likelihood=net.likelihood,
        generator=torch.Generator().manual_seed(6),
    )  # fmt: skip
    spread = exact.epistemic
    assert ((drawn.mean - exact.mean).abs() < 5 * spread / 4000**0.5).all()
    assert ((drawn.epistemic / spread - 1).abs() < 5 / 8000**0.5).all()
    torch.testing.assert_close(exact.std, torch.hypot(exact.aleatoric, spread))
    torch.testing.assert_close(exact.quantile(0.5), exact.mean)
    both = type(exact).cat([exact, exact])
    torch.testing.assert_close(
        both.log_prob(torch.zeros(10, 2))[:5], exact.log_prob(torch.zeros(5, 2))
    )


def test_class_probabilities_agree_with_draws_of_the_weights() -> None:
    net, x = trained(7, tb.Categorical()), inputs()
    one = net.predictive(x, 20_000, torch.Generator().manual_seed(7)).probs
    two = tb.predictive(
        net, net.posterior(), x, 4000, generator=torch.Generator().manual_seed(8)
    ).probs
    assert ((one - two).abs() < 5 * 0.5 * (1 / 4000 + 1 / 20_000) ** 0.5).all()


def test_learned_noise_is_trained_once_in_fit_and_finds_the_truth() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, generator=generator) * 4 - 2
    y = x.sin() + 0.2 * torch.randn(400, 1, generator=generator)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))

    run = tb.fit(make, (x, y), "vbll", epochs=60, batch_size=32, lr=0.01, progress=False)
    assert float(run.likelihood.std.detach()) == pytest.approx(0.2, rel=0.2)
    p = run.predict(torch.tensor([[0.0], [6.0]]), generator=generator)
    assert p.epistemic[1] > 3 * p.epistemic[0]  # far from the data it knows less


class Reordered(nn.Module):
    """Its last linear layer in the order of its modules is not the one that gives the outputs."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.head, self.body, self.after = nn.Linear(8, 3), nn.Linear(4, 8), after

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(self.body(x))
        return outputs if self.after is None else self.after(outputs)


def test_finds_and_names_the_last_layer() -> None:
    x, y = torch.randn(5, 4), torch.zeros(5).long()
    with pytest.raises(ValueError, match="outputs of Reordered are not those of its layer 'body'"):
        tb.VBLL(Reordered(), train_size=5).loss(x, y)
    tb.VBLL(Reordered(), train_size=5, layer="head").loss(x, y).backward()
    with pytest.raises(ValueError, match="leave a softmax"):
        tb.VBLL(Reordered(nn.Softmax(1)), train_size=5, layer="head").loss(x, y)
    plain = tb.VBLL(nn.Linear(4, 3, bias=False), train_size=5)
    plain.loss(x, y).backward()
    plain.posterior().check(plain.model)
    assert plain.layer == ""


def test_a_large_covariance_has_a_low_rank_by_default() -> None:
    small, large = tb.VBLL(network(), train_size=5), tb.VBLL(nn.Linear(512, 1000), train_size=5)
    assert (small.dense, small.rank) == (True, 7)
    assert (large.dense, large.rank) == (False, 10)
    large.loss(torch.randn(2, 512), torch.tensor([0, 1])).backward()


def test_refuses_what_it_cannot_take() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).requires_grad_(False))
    x, predicted = torch.randn(5, 4), tb.GaussianNoise(predicted=True)
    cases = [
        (tied, {}, "shares its weight with '0.weight'"),
        (frozen, {}, "the last layer '1' is frozen"),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), {}, "has no linear layer"),
        (nn.Linear(4, 3), {"layer": "fc"}, "has no module called 'fc'"),
        (network(), {"layer": "1"}, "has a Tanh, not an nn.Linear, called '1'"),
        (network(), {"prior": 0.0}, "prior is 0"),
        (network(), {"rank": -1}, "rank is -1: expected 0 for a diagonal"),
        (network(), {"init_std": 0.0}, "init_std is 0"),
        (network(), {"train_size": 0}, "train_size is 0"),
        (nn.Linear(4096, 1000), {"rank": 4097}, "67.1 GB: give rank=10"),
    ]
    for model, options, message in cases:
        with pytest.raises(ValueError, match=message):
            tb.VBLL(model, **{"train_size": 5, **options})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prior is a ScaleMixturePrior"):
        tb.VBLL(network(), train_size=5, prior=tb.ScaleMixturePrior())
    with pytest.raises(ValueError, match="has 3: give it twice as many outputs as targets"):
        tb.VBLL(nn.Linear(4, 3), predicted, train_size=5).loss(x, x[:, :1])
    with pytest.raises(ValueError, match="expected \\(examples, classes\\)"):
        tb.VBLL(nn.Linear(4, 3), train_size=5).loss(x.expand(2, 5, 4), torch.zeros(2).long())
