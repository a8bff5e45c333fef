"""The toy pictures against posteriors whose predictions are known in closed form."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import torchbayes as tb
from torchbayes.data.builtin import curve_data, toy_curve
from torchbayes.plots.curve import regression_figure


def render(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def test_curve_data_are_the_papers() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = curve_data(4000, generator=generator)
    generator.manual_seed(3)
    a = 0.5 * torch.rand(4000, 1, generator=generator).double().numpy()
    e = 0.02 * torch.randn(4000, 1, generator=generator).double().numpy()
    expected = a + 0.3 * np.sin(2 * np.pi * (a + e)) + 0.3 * np.sin(4 * np.pi * (a + e)) + e
    np.testing.assert_allclose(x, a, rtol=1e-6)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert e.std() == pytest.approx(0.02, rel=5 / math.sqrt(2 * 4000))
    assert toy_curve(torch.tensor(0.25)).item() == pytest.approx(0.55)


def test_regression_band_is_the_closed_form() -> None:
    """y = w x + b with w ~ N(2, 0.3²), b ~ N(1, 0.2²) and noise 0.1."""
    model = nn.Linear(1, 1)
    q = tb.Gaussian(
        {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([1.0])},
        {"weight": torch.tensor([[0.3]]), "bias": torch.tensor([0.2])},
    )
    x = torch.linspace(-1, 1, 50)[:, None]
    figure = regression_figure(
        model, q, x, 2 * x + 1, likelihood=tb.GaussianNoise(0.1), truth=lambda x: 2 * x + 1,
        samples=1000, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    axes = figure.axes[0]
    grid = np.asarray(axes.lines[0].get_xdata())
    assert (grid[0], grid[-1]) == pytest.approx((-2, 2))
    curves = np.sqrt((0.3 * grid) ** 2 + 0.2**2)
    observed = np.sqrt(curves**2 + 0.1**2)
    # The error of a 2.5 % quantile of n draws: √(0.025·0.975/n) over the density there.
    slack = (
        5 * math.sqrt(0.025 * 0.975 / 1000) / (math.exp(-(1.96**2) / 2) / math.sqrt(2 * math.pi))
    )
    for band, std in zip(axes.collections, (observed, curves), strict=True):
        points = band.get_paths()[0].vertices
        low = np.array([points[np.isclose(points[:, 0], g), 1].min() for g in grid])
        high = np.array([points[np.isclose(points[:, 0], g), 1].max() for g in grid])
        np.testing.assert_array_less(np.abs(low - (2 * grid + 1 - 1.96 * std)), slack * std)
        np.testing.assert_array_less(np.abs(high - (2 * grid + 1 + 1.96 * std)), slack * std)
    assert render(figure)[:4] == b"\x89PNG"


def test_refuses_other_shapes() -> None:
    q = tb.Point(tb.snapshot(nn.Linear(2, 3)))
    with pytest.raises(ValueError, match=r"shape \(5, 2\): a curve needs one number"):
        regression_figure(nn.Linear(2, 3), q, torch.zeros(5, 2), torch.zeros(5))
    point = tb.Point(tb.snapshot(nn.Linear(1, 2)))
    x, y, classes = torch.randn(5, 1), torch.zeros(5), tb.Categorical()
    with pytest.raises(ValueError, match="likelihood is for classes"):
        regression_figure(nn.Linear(1, 2), point, x, y, likelihood=classes)
