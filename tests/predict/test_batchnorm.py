"""Batch norm: the statistics of an average, or of a draw, are those of the data under its weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchbayes.average import SWA, SWAG, recalibrated_samples
from torchbayes.posterior import Gaussian, Weights, snapshot


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def data(batches: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (2 + torch.randn(32, 3, generator=generator), torch.zeros(32, dtype=torch.int64))
        for _ in range(batches)
    ]


def statistics(weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    """The mean over batches of what a batch-norm layer measures, in NumPy."""
    w, b = weights["0.weight"].numpy().astype(np.float64), weights["0.bias"].numpy()
    hidden = [x.numpy() @ w.T + b for x, _ in data()]
    return np.mean([h.mean(0) for h in hidden], 0), np.mean([h.var(0, ddof=1) for h in hidden], 0)


def assert_calibrated(weights: Weights) -> None:
    mean, variance = statistics(weights)
    np.testing.assert_allclose(weights["1.running_mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(weights["1.running_var"], variance, rtol=1e-5)


def averaged(cls: type) -> SWA | SWAG:
    model = network()
    averager = cls(model)
    for seed in range(4):
        torch.manual_seed(seed)
        nn.init.normal_(model[0].weight)
        model(data()[0][0])
        averager.update()
    return averager


@pytest.mark.parametrize("cls", [SWA, SWAG])
def test_statistics_of_the_average(cls: type) -> None:
    averager = averaged(cls)
    before = snapshot(averager._network)
    assert_calibrated(averager.posterior(data()).mean())
    after = snapshot(averager._network)
    assert all(
        torch.equal(before[name], after[name]) for name in before
    )  # the model is not touched


def test_kept_until_the_next_update() -> None:
    swa = averaged(SWA)
    swa.recalibrate(data())
    state = swa.state_dict()
    assert_calibrated(swa.posterior().mean())  # no warning: warnings are errors here
    twin = SWA(network())
    twin.load_state_dict(state)
    assert_calibrated(twin.posterior().mean())
    swa.update()
    with pytest.warns(UserWarning, match="statistics are those of the last snapshot"):
        swa.posterior()


def test_without_batch_norm_no_data_are_read() -> None:
    swa = SWA(nn.Linear(2, 1))
    swa.update()
    swa.posterior(iter(()))


def test_every_draw_has_its_own() -> None:
    model = network()
    q = Gaussian(snapshot(model), {"0.weight": torch.full((4, 3), 0.5)})
    bank = recalibrated_samples(
        model, q, data(), samples=6, generator=torch.Generator().manual_seed(0)
    )
    assert len(bank) == 6
    generator = torch.Generator().manual_seed(0)
    for draw in bank:
        assert torch.equal(draw["0.weight"], q.sample(generator)["0.weight"])
        assert_calibrated(draw)


def test_draws_can_live_in_a_folder(tmp_path: object) -> None:
    model = network()
    q = Gaussian(snapshot(model), {"0.weight": torch.ones(4, 3)})
    bank = recalibrated_samples(model, q, data(), samples=2, folder=f"{tmp_path}/bank")
    assert bank.folder is not None
    assert_calibrated(bank[1])


def test_refuses_what_cannot_be_repeated() -> None:
    model = network()
    q = Gaussian(snapshot(model), {})
    with pytest.raises(ValueError, match="used up by the first draw"):
        recalibrated_samples(model, q, iter(data()))
    with pytest.raises(ValueError, match="samples is 0"):
        recalibrated_samples(model, q, data(), samples=0)
    with pytest.raises(ValueError, match="does not have"):
        recalibrated_samples(nn.Linear(3, 2), q, data())
