"""Pruning by signal-to-noise ratio."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.applications.prune import prune, signal_to_noise
from torchbayes.variational import MeanField


def posterior() -> tb.Gaussian:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mean = {"a": random(40, 30), "b": random(7), "norm": random(5)}
    std = {"a": random(40, 30).abs(), "b": random(7).abs()}
    return tb.Gaussian(mean, std, model_name="Net")


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.75, 0.98, 1.0])
def test_the_least_certain_weights_go(fraction: float) -> None:
    q = posterior()
    pruned = prune(q, fraction)
    mean, std = (
        {n: w.numpy() for n, w in weights.items()} for weights in (pruned.mean(), pruned.std())
    )
    old_mean, old_std = ({n: w.numpy() for n, w in g.items()} for g in (q.mean(), q.std()))
    ratio = np.concatenate([(np.abs(old_mean[n]) / old_std[n]).ravel() for n in old_std])
    gone = np.concatenate([(std[n] == 0).ravel() for n in std])
    assert gone.sum() == round(fraction * len(ratio))
    if 0 < fraction < 1:
        assert ratio[gone].max() <= ratio[~gone].min()
    for name in std:
        assert ((mean[name] == 0) == (std[name] == 0)).all()
        kept = std[name] > 0
        assert (mean[name][kept] == old_mean[name][kept]).all()
        assert (std[name][kept] == old_std[name][kept]).all()
    assert (mean["norm"] == old_mean["norm"]).all()
    assert pruned.model_name == "Net"
    assert all(
        (q.mean()[n].numpy() == old_mean[n]).all() for n in old_mean
    )  # the given one is as it was


def test_no_draw_brings_a_weight_back() -> None:
    pruned = prune(posterior(), 0.75)
    draw = pruned.sample()
    for name, std in pruned.std().items():
        assert (draw[name][std == 0] == 0).all()
        assert (draw[name][std > 0] != 0).all()


def test_pruning_again_and_saving(tmp_path) -> None:
    once = prune(posterior(), 0.5)
    twice = prune(once, 0.75)
    zeros = sum(int((s == 0).sum()) for s in twice.std().values())
    assert zeros == round(0.75 * 1207)
    for name, std in once.std().items():
        assert (twice.std()[name][std == 0] == 0).all()
    twice.save(tmp_path / "pruned.safetensors")
    loaded = tb.load(tmp_path / "pruned.safetensors")
    assert all(torch.equal(loaded.mean()[n], m) for n, m in twice.mean().items())


def test_signal_to_noise_against_numpy() -> None:
    q = posterior()
    ratio = np.concatenate(
        [(q.mean()[n].abs() / q.std()[n]).double().numpy().ravel() for n in q.std()]
    )
    decibels = np.sort(10 * np.log10(ratio))
    curve = signal_to_noise(q, bins=20)
    np.testing.assert_allclose(curve.values.numpy(), decibels)
    density, edges = np.histogram(decibels, bins=20, density=True)
    np.testing.assert_allclose(curve.edges.numpy(), edges)
    np.testing.assert_allclose(curve.density.numpy(), density, atol=1e-12)
    counts = np.histogram(decibels, bins=20)[0]
    np.testing.assert_allclose(curve.cdf.numpy(), counts.cumsum() / len(decibels))


def test_signal_to_noise_of_pruned_and_equal_weights() -> None:
    curve = signal_to_noise(prune(posterior(), 0.4), bins=10)
    assert torch.isinf(curve.values).sum() == round(0.4 * 1207)
    assert curve.cdf[-1] == 1
    widths = curve.edges[1:] - curve.edges[:-1]
    assert float((curve.density * widths).sum()) == pytest.approx(1 - round(0.4 * 1207) / 1207)
    same = signal_to_noise(tb.Gaussian({"w": torch.ones(4)}, {"w": torch.ones(4)}), bins=2)
    assert same.cdf[-1] == 1
    gone = signal_to_noise(prune(posterior(), 1.0), bins=3)
    assert gone.density.sum() == 0
    assert gone.cdf[-1] == 1


def test_a_mean_field_can_be_pruned() -> None:
    net = MeanField(nn.Linear(30, 10), init_std=0.1)
    pruned = prune(net.posterior(), 0.5)
    assert sum(int((m == 0).sum()) for m in pruned.mean().values()) == 155


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_fractions_outside_of_0_to_1(fraction: float) -> None:
    with pytest.raises(ValueError, match="expected a share of the weights, 0 to 1"):
        prune(posterior(), fraction)


def test_bad_posteriors_and_bins() -> None:
    with pytest.raises(TypeError, match="cannot prune a Point posterior"):
        prune(tb.Point({"w": torch.ones(2)}), 0.5)
    with pytest.raises(ValueError, match="no random weights"):
        prune(tb.Gaussian({"w": torch.ones(2)}, {}), 0.5)
    with pytest.raises(ValueError, match="bins is 0"):
        signal_to_noise(posterior(), bins=0)
