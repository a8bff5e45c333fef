"""R-hat and effective sample size: known cases, both of ArviZ's data types, and input that is not enough."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, rankdata

import torchbayes as tb
from torchbayes.checks.convergence import by_chain, ess, rhat, to_arviz
from torchbayes.checks.diagnosis import predictions

pytest.importorskip("xarray")
RNG = np.random.default_rng(0)


def split_rhat(values: np.ndarray) -> float:
    """The basic R-hat of halves of chains, literally from Gelman et al.'s definition."""
    half = values.shape[1] // 2
    chains = np.concatenate([values[:, :half], values[:, -half:]])
    within = chains.var(1, ddof=1).mean()
    between = half * chains.mean(1).var(ddof=1)
    return float(np.sqrt(((half - 1) / half * within + between / half) / within))


def ranked(values: np.ndarray) -> np.ndarray:
    """Vehtari et al. 2021, Eq. (14)."""
    ranks = rankdata(values).reshape(values.shape)
    return norm.ppf((ranks - 3 / 8) / (values.size + 1 / 4))


def test_rhat_is_the_rank_normalised_folded_split_one() -> None:
    values = RNG.standard_normal((4, 50)) * np.asarray([[1.0], [1.0], [1.5], [1.0]])
    folded = np.abs(values - np.median(values))
    expected = max(split_rhat(ranked(values)), split_rhat(ranked(folded)))
    assert float(rhat(values)) == pytest.approx(expected, rel=1e-6)


def test_chains_that_agree_and_chains_that_do_not() -> None:
    same = RNG.standard_normal((4, 200, 3))
    assert rhat(same).shape == (3,)
    assert rhat(same).max() < 1.03
    constant = np.concatenate([same, np.zeros_like(same)], axis=2)
    assert np.isnan(rhat(constant)).tolist() == [False] * 3 + [True] * 3
    apart = same + np.arange(4)[:, None, None]
    assert rhat(apart).min() > 1.5


def test_effective_sample_size_of_an_autoregression() -> None:
    """An AR(1) chain with coefficient φ is worth n(1 − φ)/(1 + φ) draws."""
    phi, n = 0.7, 4000
    noise = RNG.standard_normal((4, n)) * np.sqrt(1 - phi**2)
    chain = np.zeros_like(noise)
    for t in range(1, n):
        chain[:, t] = phi * chain[:, t - 1] + noise[:, t]
    assert float(ess(chain)) == pytest.approx(4 * n * (1 - phi) / (1 + phi), rel=0.15)


def test_draws_are_sorted_into_chains() -> None:
    values = RNG.standard_normal((7, 2))
    sorted_ = by_chain(values, [3, 3, 3, 1, 1, 1, 1])
    np.testing.assert_array_equal(sorted_, np.stack([values[:3], values[3:6]]))
    with pytest.raises(ValueError, match="7 values but 2 chain numbers"):
        by_chain(values, [0, 1])


@pytest.mark.parametrize("shape", [(1, 50), (50,)])
def test_fewer_than_two_chains(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="R-hat needs at least 2 chains and there is 1: run more"):
        rhat(np.zeros(shape))


def test_too_few_draws() -> None:
    with pytest.raises(ValueError, match="at least 4 draws per chain and there are 3"):
        ess(np.zeros((2, 3)))


def test_arviz_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"torchbayes\[diagnostics\]"):
        rhat(np.zeros((2, 10)))


def test_the_data_type_of_the_installed_arviz() -> None:
    arviz = pytest.importorskip("arviz")
    data = to_arviz(a=np.zeros((2, 5, 3)))
    old = int(arviz.__version__.partition(".")[0]) < 1
    assert type(data).__name__ == ("InferenceData" if old else "DataTree")
    assert data["posterior"]["a"].dims[:2] == ("chain", "draw")


def test_the_call_of_arviz_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `from_dict` takes groups; that of 0.x takes variables. Which call is made goes by the version."""
    calls: list[Any] = []
    new = SimpleNamespace(__version__="1.3.0", from_dict=lambda groups: calls.append(groups))
    monkeypatch.setitem(sys.modules, "arviz", new)  # type: ignore[arg-type]
    to_arviz(a=[[1.0]])
    assert list(calls[0]) == ["posterior"]


def test_weights_mislead_and_predictions_do_not() -> None:
    """Two chains in two modes that are the same function: hidden units permuted."""
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    generator = torch.Generator().manual_seed(0)
    samples = tb.Samples(net)
    base = {
        "0.weight": torch.tensor([[2.0], [-1.0]]), "0.bias": torch.tensor([0.5, 0.0]),
        "2.weight": torch.tensor([[1.0, 3.0]]), "2.bias": torch.zeros(1),
    }  # fmt: skip
    for chain in range(2):
        for _ in range(50):
            own = {n: w + 0.1 * torch.randn(w.shape, generator=generator) for n, w in base.items()}
            if chain:
                own = {n: w.flip(1 if n == "2.weight" else 0) for n, w in own.items()}
            samples.append(own, chain=chain)
    inputs = torch.linspace(-1, 1, 5).unsqueeze(1)
    found = predictions(net, samples, inputs, tb.GaussianNoise(std=0.1))
    assert found.shape == (2, 50, 5, 1)
    assert rhat(found).max() < 1.1
    weights = by_chain(torch.stack([w["0.weight"].flatten() for w in samples]), samples.chains)
    assert rhat(weights).max() > 1.5
