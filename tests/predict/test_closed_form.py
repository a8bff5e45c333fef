"""The closed-form prediction of a regression against torch's multivariate normal distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from torchbayes.predict.closed_form import GaussianPredictive

GENERATOR = torch.Generator().manual_seed(0)
MEAN = torch.randn(5, 2, generator=GENERATOR, dtype=torch.float64)
ROOT = torch.randn(5, 2, 2, generator=GENERATOR, dtype=torch.float64)
COVARIANCE = ROOT @ ROOT.mT
NOISE = torch.tensor(0.7, dtype=torch.float64)
TARGETS = torch.randn(5, 2, generator=GENERATOR, dtype=torch.float64)


def predictive(correlated: bool) -> GaussianPredictive:
    spread = COVARIANCE if correlated else COVARIANCE.diagonal(dim1=1, dim2=2)
    return GaussianPredictive(MEAN, spread, NOISE)


def truth(correlated: bool) -> MultivariateNormal:
    diagonal = torch.diag_embed(COVARIANCE.diagonal(dim1=1, dim2=2))
    total = COVARIANCE if correlated else diagonal
    return MultivariateNormal(MEAN, total + 0.49 * torch.eye(2))


both = pytest.mark.parametrize("correlated", [False, True])


@both
def test_density_moments_and_quantiles(correlated: bool) -> None:
    p, q = predictive(correlated), truth(correlated)
    torch.testing.assert_close(p.log_prob(TARGETS), q.log_prob(TARGETS))
    torch.testing.assert_close(p.mean, q.mean)
    torch.testing.assert_close(p.std, q.stddev)
    expected = Normal(q.mean, q.stddev).icdf(torch.tensor(0.9, dtype=torch.float64))
    torch.testing.assert_close(p.quantile(0.9), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(p.epistemic.square() + p.aleatoric.square(), q.variance)


@both
def test_draws_have_the_covariance(correlated: bool) -> None:
    drawn = predictive(correlated).sample(40_000, torch.Generator().manual_seed(1))
    assert drawn.shape == (40_000, 5, 2)
    covariance = truth(correlated).covariance_matrix
    for example in range(5):
        found = torch.cov(drawn[:, example].t())
        # The deviation of a sample covariance is at most √2 of the larger variance / √count.
        bound = 5 * 2**0.5 * float(covariance[example].max()) / 200
        torch.testing.assert_close(found, covariance[example], rtol=0, atol=bound)
        mean: Tensor = drawn[:, example].mean(0)
        torch.testing.assert_close(mean, MEAN[example], rtol=0, atol=bound)


@both
def test_parts_and_units(correlated: bool) -> None:
    p = predictive(correlated)
    order = torch.tensor([3, 0])
    torch.testing.assert_close(p.subset(order).log_prob(TARGETS[order]), p.log_prob(TARGETS)[order])
    joined = GaussianPredictive.cat([p.subset(torch.arange(2)), p.subset(torch.arange(2, 5))])
    assert torch.equal(joined.log_prob(TARGETS), p.log_prob(TARGETS))
    other = p.rescaled(1.0, 3.0)
    # y ↦ 3y + 1 divides the density by 3 for each of two outputs.
    moved = other.log_prob(3 * TARGETS + 1) + 2 * torch.log(torch.tensor(3.0))
    torch.testing.assert_close(moved, p.log_prob(TARGETS))
    torch.testing.assert_close(other.epistemic, 3 * p.epistemic)
    with pytest.raises(ValueError, match="nothing to merge"):
        p.merge(p)
