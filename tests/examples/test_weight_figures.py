"""Weight histograms and signal-to-noise ratios against the distributions they are drawn from."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import nn

import torchbayes as tb
from examples.figures.weights import snr_figure, weight_figure


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 200), nn.LayerNorm(200), nn.Linear(200, 10))


def render(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def test_histograms_are_the_densities() -> None:
    model = network()
    mean = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    wide = tb.Gaussian(mean, {n: torch.full_like(p, 0.5) for n, p in mean.items()})
    narrow = tb.Gaussian(mean, {n: torch.full_like(p, 0.1) for n, p in mean.items()})
    figure = weight_figure(
        model, {"wide": wide, "narrow": narrow}, generator=torch.Generator().manual_seed(0)
    )
    assert [axes.get_title() for axes in figure.axes] == ["wide", "narrow"]
    count = 100 * 200 + 200 * 10  # matrices only
    for axes, std in zip(figure.axes, (0.5, 0.1), strict=True):
        values, edges, _ = axes.patches[-1].get_data()
        shares = np.diff(stats.norm(0, std).cdf(edges))
        error = np.sqrt(shares * (1 - shares) / count) + 1 / count
        np.testing.assert_array_less(np.abs(values * np.diff(edges) - shares), 5 * error)
        assert edges[-1] == pytest.approx(stats.norm(0, 0.5).isf(0.0005), rel=0.1)
    assert render(figure)[:4] == b"\x89PNG"


def test_points_dropout_and_samples_can_stand_beside_each_other() -> None:
    model = network()
    bank = tb.Samples(model)
    bank.append()
    posteriors = {
        "SGD": tb.Point(tb.snapshot(model)),
        "dropout": tb.MCDropout(model, p=0.5).posterior(),
        "samples": bank,
    }
    figure = weight_figure(model, posteriors, span=0.2)
    heights = [axes.patches[-1].get_data()[0] for axes in figure.axes]
    np.testing.assert_array_equal(heights[0], heights[1])
    np.testing.assert_array_equal(heights[0], heights[2])
    assert figure.axes[0].get_xlim() == (-0.2, 0.2)


def test_snr_density_and_distribution_function() -> None:
    """log₁₀|μ| uniform in [−2, 2] and σ = 1: a flat density over 40 dB and a straight line."""
    exponents = torch.linspace(-2, 2, 20_001, dtype=torch.float64)
    q = tb.Gaussian({"w": 10**exponents}, {"w": torch.ones(20_001, dtype=torch.float64)})
    figure = snr_figure({"flat": q}, fractions=(0.25, 0.75))
    density, cumulative = figure.axes
    values, _, _ = density.patches[0].get_data()
    np.testing.assert_allclose(values, 1 / 40, rtol=0.03)
    x, y = cumulative.lines[0].get_data()
    np.testing.assert_allclose(y, (np.asarray(x) + 20) / 40, atol=1e-3)
    ends = [line.get_xdata() for line in cumulative.lines[1:]]
    marks = [left for left, right in ends if left == right]
    assert marks == pytest.approx([-10, 10], abs=0.01)
    assert render(figure)[:4] == b"\x89PNG"


def test_refuses_what_it_cannot_draw() -> None:
    model = network()
    with pytest.raises(ValueError, match="no posteriors"):
        weight_figure(model, {})
    with pytest.raises(ValueError, match="no weight matrices"):
        weight_figure(nn.LayerNorm(3), {"q": tb.Point(tb.snapshot(nn.LayerNorm(3)))})
    with pytest.raises(ValueError, match="does not have"):
        weight_figure(nn.Linear(2, 2), {"q": tb.Point(tb.snapshot(model))})
    with pytest.raises(ValueError, match="no random weights"):
        snr_figure({"q": tb.Gaussian(tb.snapshot(model), {})})
    gone = tb.Gaussian({"w": torch.zeros(3)}, {"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="no weight has a signal-to-noise ratio"):
        snr_figure({"q": gone})


def test_pruned_weights_count_in_the_distribution_function() -> None:
    mean, std = torch.tensor([0.0, 0.0, 1.0, 10.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    cumulative = snr_figure({"half": tb.Gaussian({"w": mean}, {"w": std})}).axes[1]
    shares = np.asarray(cumulative.lines[0].get_ydata())
    assert shares.min() >= 0.5
    assert shares.max() == 1


def test_equal_ratios_have_a_width() -> None:
    q = tb.Gaussian({"w": torch.ones(5)}, {"w": torch.ones(5)})
    values, edges, _ = snr_figure({"same": q}).axes[0].patches[0].get_data()
    assert (values * np.diff(edges)).sum() == pytest.approx(1)
