"""SWA, SWAG and HWA against NumPy's moments over the stored iterates (FACTS of HWA Eq. 4 and SWAG Eq. 1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from torchbayes.average import HWA, SWA, SWAG
from torchbayes.posterior import Gaussian, LowRankGaussian, Wrapper, snapshot
from torchbayes.variational import MeanField

SHAPE = (3, 2)


class Path(Wrapper):
    """A mean field that is wherever a stored path says it is."""

    def __init__(self, mu: np.ndarray, sigma: np.ndarray, dtype: torch.dtype) -> None:
        super().__init__(nn.Linear(2, 3, bias=False).to(dtype))
        self.mu, self.sigma = (torch.from_numpy(a).to(dtype) for a in (mu, sigma))
        self.now = 0

    def posterior(self) -> Gaussian:
        return Gaussian({"weight": self.mu[self.now]}, {"weight": self.sigma[self.now]})


def iterates(
    count: int = 12, offset: float = 0.0, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    mu = offset + scale * rng.standard_normal((count, *SHAPE))
    return mu, scale * rng.uniform(0.1, 1.0, (count, *SHAPE))


def hwa(
    mu: np.ndarray, sigma: np.ndarray, rank: int = 0, dtype: torch.dtype = torch.float64
) -> HWA:
    path = Path(mu, sigma, dtype)
    averager = HWA(path, rank)
    for path.now in range(len(mu)):
        averager.update()
    return averager


def swag(mu: np.ndarray, rank: int = 0) -> SWAG:
    model = nn.Linear(2, 3, bias=False).double()
    averager = SWAG(model, rank)
    for value in mu:
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(value))
        averager.update()
    return averager


def running_deviations(mu: np.ndarray) -> np.ndarray:
    """θ_r − θ̄_r with θ̄_r the mean of the first r iterates: the columns of D̂."""
    return np.stack([mu[r] - mu[: r + 1].mean(0) for r in range(len(mu))])


def test_hwa_moments_are_numpys() -> None:
    mu, sigma = iterates()
    q = hwa(mu, sigma).posterior()
    np.testing.assert_allclose(q.mean()["weight"], mu.mean(0), rtol=1e-13, atol=1e-15)
    variance = (sigma**2).mean(0) + mu.var(0)  # V + S − μ̄²
    np.testing.assert_allclose(q.std()["weight"] ** 2, variance, rtol=1e-12)


def test_moments_of_the_mixture_by_sampling_it() -> None:
    """Independent of the formula: draw snapshots, then weights, and measure."""
    mu, sigma = iterates(4)
    rng, count = np.random.default_rng(1), 200_000
    which = rng.integers(0, 4, count)
    draws = mu[which] + sigma[which] * rng.standard_normal((count, *SHAPE))
    q = hwa(mu, sigma).posterior()
    variance = q.std()["weight"].numpy() ** 2
    error = np.sqrt((draws**4).mean(0) / count)  # at least the standard error of a second moment
    np.testing.assert_array_less(np.abs(draws.var(0) - variance), 5 * error)


def test_swag_moments_are_numpys_and_hwas_without_sigma() -> None:
    mu, sigma = iterates()
    for rank in (0, 5):
        one, other = swag(mu, rank).posterior(), hwa(mu, 0 * sigma, rank).posterior()
        assert torch.equal(one.mean()["weight"], other.mean()["weight"])
        assert torch.equal(one.std()["weight"], other.std()["weight"])
    np.testing.assert_allclose(swag(mu).posterior().std()["weight"] ** 2, mu.var(0), rtol=1e-12)


def test_constant_trajectory_comes_back_with_variance_v() -> None:
    mu, sigma = np.ones((6, *SHAPE)), np.full((6, *SHAPE), 0.25)
    for rank in (0, 3):
        q = hwa(mu, sigma, rank).posterior()
        assert torch.equal(q.mean()["weight"], torch.ones(SHAPE, dtype=torch.float64))
        assert torch.equal(q.std()["weight"], torch.full(SHAPE, 0.25, dtype=torch.float64))


def test_equation_4_as_printed_fails_on_a_constant_trajectory() -> None:
    """Why it is not what the library does.

    The printed second line stores the variance back into σ^HWA, where the next update needs the second
    moment, and so subtracts μ̄² anew each time; σ^{k+1} does not enter at all. With μ = 1 the
    "variance" is 0, −½, −1, −3/2, … although nothing moves.
    """
    mu, mean, variance, printed = 1.0, 1.0, 0.0, []
    for n in range(1, 5):
        mean_new = (n * mean + mu) / (n + 1)
        printed.append(variance)
        variance = (n * variance + mu**2) / (n + 1) - mean_new**2
        mean = mean_new
    assert printed == pytest.approx([0.0, -1 / 2, -1.0, -3 / 2])


def test_the_spread_survives_single_precision() -> None:
    """S − μ̄² by subtraction loses all digits here; the running form keeps them."""
    mu, sigma = iterates(50, offset=100.0, scale=0.01)
    mu32 = mu.astype(np.float32)
    truth = mu32.astype(np.float64).var(0)
    subtracted = (mu32**2).mean(0, dtype=np.float32) - mu32.mean(0, dtype=np.float32) ** 2
    assert np.abs(subtracted - truth).max() > 0.5 * truth.max()
    q = hwa(mu32, 0 * sigma.astype(np.float32), dtype=torch.float32).posterior()
    # The running mean near 100 is known to about 4e-6 · √50, the spread to 2 · std · that.
    np.testing.assert_allclose(q.std()["weight"].double() ** 2, truth, rtol=0.01)


@pytest.mark.parametrize("rank", [2, 5, 20])
def test_low_rank_covariance_is_the_formula(rank: int) -> None:
    mu, sigma = iterates()
    q = hwa(mu, sigma, rank).posterior()
    assert isinstance(q, LowRankGaussian)
    columns = running_deviations(mu)[-rank:].reshape(-1, 6)
    used = len(columns)
    assert q.rank == used
    diagonal = 2 * (sigma**2).mean(0) + mu.var(0)  # Σ_diag with V doubled, so that it is not halved
    covariance = 0.5 * np.diag(diagonal.ravel()) + columns.T @ columns / (2 * (used - 1))
    np.testing.assert_allclose(q.std()["weight"].ravel() ** 2, covariance.diagonal(), rtol=1e-12)
    count, generator = 20_000, torch.Generator().manual_seed(0)
    draws = np.stack([q.sample(generator)["weight"].numpy().ravel() for _ in range(count)])
    found = np.cov(draws.T)
    variances = covariance.diagonal()
    error = np.sqrt((covariance**2 + np.outer(variances, variances)) / count)
    np.testing.assert_array_less(np.abs(found - covariance), 5 * error)
    mean_error = np.sqrt(variances / count)
    np.testing.assert_array_less(np.abs(draws.mean(0) - mu.mean(0).ravel()), 5 * mean_error)


def test_two_columns_and_all_iterates_give_back_the_whole_spread() -> None:
    """For two iterates the two halves of SWAG's covariance are equal, so they add up to S − μ̄²."""
    mu, _ = iterates(2)
    np.testing.assert_allclose(swag(mu, 4).posterior().std()["weight"] ** 2, mu.var(0), rtol=1e-12)


def test_hwa_of_a_mean_field_in_training() -> None:
    torch.manual_seed(0)
    net = MeanField(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), init_std=0.2)
    optimizer, averager = torch.optim.SGD(net.parameters(), lr=0.5), HWA(net, rank=3)
    path: list[Gaussian] = []
    for _ in range(5):
        optimizer.zero_grad()
        (net(torch.randn(8, 2)).sub(torch.arange(3)).square().mean() + net.kl() / 100).backward()
        optimizer.step()
        averager.update()
        path.append(net.posterior())
    q = averager.posterior()
    assert q.std().keys() == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }  # the norm's spread counts too
    for name, std in q.std().items():
        mu = np.stack([p.mean()[name].double().numpy() for p in path])
        sigma = [p.std().get(name, torch.zeros(())).double().numpy() for p in path]
        columns = running_deviations(mu)[-3:]
        variance = np.mean(np.square(sigma), 0) + mu.var(0) / 2 + (columns**2).sum(0) / 4
        assert mu.var(0).max() > 1e-4
        np.testing.assert_allclose(q.mean()[name], mu.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(std.double() ** 2, variance, rtol=1e-4)


def test_swa_is_the_mean_and_torchs_average() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    swa, torchs, seen = SWA(model), torch.optim.swa_utils.AveragedModel(model), []
    for _ in range(9):
        nn.init.normal_(model.weight)
        swa.update()
        torchs.update_parameters(model)
        seen.append(model.weight.detach().double().numpy().copy())
    mean = swa.posterior().mean()["weight"]
    np.testing.assert_allclose(mean, np.mean(seen, 0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mean, snapshot(torchs.module)["weight"], rtol=1e-6, atol=1e-7)
