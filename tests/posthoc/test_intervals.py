"""Conformal intervals: literal transcriptions, and the exact finite-sample guarantee."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import torchbayes as tb
from torchbayes.posthoc import conformal_intervals

SCORES = ("residual", "quantile")


def problem(count: int, seed: int, outputs: int = 1) -> tuple[tb.RegressionPredictive, Tensor]:
    """Heteroscedastic data, predicted by three draws that are biased and far too sure."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    y = x.sin() + (0.1 + x) * noise
    draws = torch.stack([x + shift for shift in (0.1, 0.2, 0.3)])
    both = torch.cat([draws, (0.05 + 0.3 * x).log().expand(3, -1, -1)], -1)
    return tb.GaussianNoise(predicted=True).predictive(both), y


def test_the_residual_score_is_the_order_statistic_of_residuals() -> None:
    p, y = problem(99, 0)
    rule = conformal_intervals(p, y, 0.8, "residual")
    residuals = np.sort(np.abs(y.numpy() - p.mean.numpy()).ravel())
    assert float(rule.margin) == residuals[80 - 1]  # ⌈100 · 0.8⌉
    low, high = rule(p)
    np.testing.assert_allclose(low, p.mean - rule.margin)
    np.testing.assert_allclose(high, p.mean + rule.margin)


def test_the_quantile_score_is_romanos() -> None:
    """Romano, Patterson and Candès (2019), Algorithm 1, transcribed with quantiles by SciPy."""
    p, y = problem(99, 1)
    rule = conformal_intervals(p, y, 0.8)
    means, stds, values = (t.numpy()[..., 0] for t in (p.means, p.stds, y))

    def quantile(q: float) -> np.ndarray:  # type: ignore[type-arg]
        grid = np.linspace(-6, 6, 200_001)
        found = []
        for m, s in zip(means.T, stds.T, strict=True):
            below = stats.norm.cdf(grid[::100, None], m, s).mean(1)
            i = 100 * max(int(np.searchsorted(below, q)) - 1, 0)
            fine = grid[i : i + 102]
            found.append(np.interp(q, stats.norm.cdf(fine[:, None], m, s).mean(1), fine))
        return np.array(found)

    low, high = quantile(0.1), quantile(0.9)
    scores = np.sort(np.maximum(low - values, values - high))
    assert float(rule.margin) == pytest.approx(scores[80 - 1], abs=1e-6)
    ends = rule(p)
    np.testing.assert_allclose(ends[0][:, 0], low - scores[79], atol=1e-6)
    np.testing.assert_allclose(ends[1][:, 0], high + scores[79], atol=1e-6)
    widths = (ends[1] - ends[0])[:, 0]
    assert float(widths.max() / widths.min()) > 1.3  # they depend on the input


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("n", "coverage"), [(19, 0.9), (30, 0.5)])
def test_coverage_is_exactly_what_the_theorem_says(score: str, n: int, coverage: float) -> None:
    """Over calibration sets, coverage of new examples is Beta(k, n + 1 − k): its mean is k/(n + 1)."""
    repeats, fresh = 600, 40
    k = math.ceil((n + 1) * coverage - 1e-9)
    p, y = problem(n + fresh, 2, outputs=repeats)  # each output is a problem of its own
    old, new = torch.arange(n), torch.arange(n, n + fresh)
    low, high = conformal_intervals(p.subset(old), y[old], coverage, score)(p.subset(new))
    hits = ((low <= y[new]) & (y[new] <= high)).double().mean(0).numpy()
    truth = stats.beta(k, n + 1 - k)
    variance = truth.var() + (truth.mean() - truth.moment(2)) / fresh  # of the set, and of the hits
    assert np.mean(hits) == pytest.approx(k / (n + 1), abs=4 * math.sqrt(variance / repeats))
    assert np.var(hits) == pytest.approx(variance, rel=0.35)


@pytest.mark.parametrize("score", SCORES)
def test_every_output_has_its_own_margin(score: str) -> None:
    p, y = problem(400, 3, outputs=2)
    y = y * torch.tensor([1.0, 10.0])
    rule = conformal_intervals(p, y, 0.9, score)
    assert rule.margin.shape == (2,)
    low, high = rule(p)
    covered = ((low <= y) & (y <= high)).double().mean(0)
    torch.testing.assert_close(covered, torch.full((2,), 0.9025, dtype=torch.float64))
    assert rule.margin[1] > 3 * rule.margin[0]


def test_too_few_examples_promise_everything_and_counts_are_covered() -> None:
    p, y = problem(8, 4)
    low, high = conformal_intervals(p, y, 0.9)(p)
    assert bool((low == -math.inf).all() & (high == math.inf).all())
    rates = torch.rand(1, 2000, generator=torch.Generator().manual_seed(5)) * 3
    counts = torch.poisson(rates[0].exp(), generator=torch.Generator().manual_seed(6))
    many = tb.Poisson().predictive(rates)
    for score in SCORES:
        low, high = conformal_intervals(many, counts, 0.9, score)(many)
        assert float(((low <= counts) & (counts <= high)).double().mean()) >= 0.9


def test_a_predictive_that_is_too_wide_is_narrowed_and_never_crosses() -> None:
    y = torch.linspace(-1, 1, 101, dtype=torch.float64)
    wide = tb.GaussianNoise(50.0).double().predictive(torch.zeros(1, 101, dtype=torch.float64))
    rule = conformal_intervals(wide, y, 0.9)
    assert float(rule.margin) < 0
    narrow = tb.GaussianNoise(0.01).double().predictive(torch.zeros(1, 5, dtype=torch.float64))
    low, high = rule(narrow)
    assert bool((low == high).all())


def test_what_is_no_regression_is_refused() -> None:
    p, y = problem(20, 7)
    classes = tb.Categorical().predictive(torch.zeros(1, 20, 3))
    with pytest.raises(TypeError, match="conformal_sets"):
        conformal_intervals(classes, y)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="score is 'width'"):
        conformal_intervals(p, y, score="width")
    with pytest.raises(ValueError, match="coverage is 90"):
        conformal_intervals(p, y, 90)
    with pytest.raises(ValueError, match="one target per output"):
        conformal_intervals(p, y[:5])
    with pytest.raises(ValueError, match="not finite"):
        conformal_intervals(p, y * math.nan)
