"""Correlations of weights against what they have to be, by strategy, and the pictures of weight pairs."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch

import torchbayes as tb
from torchbayes.models import mlp, wide_resnet
from torchbayes.plots.diversity import weight_correlations, weight_pair_figure, weight_samples


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scaled(strategy: str) -> tb.Hypernet:
    """A hypernetwork whose hidden units move together, as they come to do in training with U(0, 1).

    With W1 positive and one latent, w is proportional to z: all weights of a group are fully correlated.
    """
    net = tb.Hypernet(
        wide_resnet(10, 1), strategy, tb.latents.uniform_positive, 1, 4, generator=seeded(0)
    )
    with torch.no_grad():
        for first in net.first.parameters():
            first.abs_()
    return net


@pytest.mark.parametrize(
    ("strategy", "within", "between"),
    [("all-in-one", 1.0, 1.0), ("block-wise", 1.0, 0.0), ("layer-wise", None, 0.0)],
)
def test_correlations_by_strategy(strategy: str, within: float | None, between: float) -> None:
    net = scaled(strategy)
    found = weight_correlations(net, net.posterior(), pairs=400, draws=400, generator=seeded(1))
    assert found.floor == pytest.approx(math.sqrt(2 / (math.pi * 400)))
    assert found.between is not None
    if between == 1.0:
        assert found.between == pytest.approx(1, abs=1e-5)
    else:
        # Independent latents of few groups: the mean |r| is about the floor, never far above.
        assert found.between < 4 * found.floor
    if within is None:
        # Both weights of a pair are in the same layer with the share of the layers in the block.
        assert 0.3 < found.within < 0.8
    else:
        assert found.within == pytest.approx(within, abs=1e-5)


def test_correlation_is_pearsons() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]])  # covariance with correlation 0.6

    class Correlated(tb.Posterior):
        def mean(self) -> tb.Weights:
            return {"weight": torch.zeros(1, 2)}

        def sample(self, generator: torch.Generator | None = None) -> tb.Weights:
            return {"weight": (root @ torch.randn(2, generator=generator)).view(1, 2)}

        def _file_tensors(self) -> dict[str, tb.Weights]:
            return {}

        @classmethod
        def _from_file(cls, groups: object, settings: object) -> tb.Posterior:
            raise NotImplementedError

    draws = weight_samples(Correlated(), {"weight": torch.tensor([0, 1])}, 4000, seeded(0))
    r = np.corrcoef(draws["weight"].numpy().T)[0, 1]
    assert abs(r - 0.6) < 5 * (1 - 0.36) / math.sqrt(4000)
    found = weight_correlations(model, Correlated(), pairs=200, draws=4000, generator=seeded(0))
    # Half of the pairs are a weight with itself.
    assert abs(found.within - 0.8) < 5 * 0.2 / math.sqrt(200) + 0.05
    assert found.between is None


def test_mean_field_has_no_correlations() -> None:
    model = mlp(4, hidden=(8, 8))
    posterior = tb.MeanField(model, init_std=0.1).posterior()
    found = weight_correlations(model, posterior, pairs=200, draws=300, generator=seeded(0))
    assert found.between is not None
    # |r| of independent weights has the half-normal's spread, 0.6/√300 a pair.
    assert abs(found.between - found.floor) < 5 * 0.6 / math.sqrt(300 * 200)


def test_a_few_networks_have_no_correlations() -> None:
    model = mlp(4, hidden=(8,))
    bank = tb.Samples(model)
    bank.append()
    for posterior in (tb.Point(tb.snapshot(model)), bank):
        with pytest.raises(ValueError, match="too few networks"):
            weight_correlations(model, posterior)


def test_figure_has_scatter_and_histograms() -> None:
    net = scaled("all-in-one")
    point = tb.Point(tb.snapshot(net.model))
    pair = (("layer1.0.conv1.weight", 0), ("layer2.0.conv1.weight", 3))
    bank = tb.Samples(net.model)
    for _ in range(4):
        torch.nn.init.normal_(net.model.layer1[0].conv1.weight)
        bank.append()
    figure = weight_pair_figure(
        {"hypernetwork": net.posterior(), "MAP": point, "ensemble": bank},
        pair,
        draws=50,
        generator=seeded(0),
    )
    scatter = figure.axes[6].collections[0].get_offsets()
    assert scatter.shape == (50, 2)
    assert (
        "correlation +1.00" in figure.axes[0].get_title() or "-1.00" in figure.axes[0].get_title()
    )
    assert "a point" in figure.axes[2].get_title()
    assert "4 networks" in figure.axes[4].get_title()
    assert figure.axes[10].collections[0].get_offsets().shape == (4, 2)
    figure.savefig(io.BytesIO(), format="png")
    with pytest.raises(ValueError, match="no posteriors"):
        weight_pair_figure({}, pair)
