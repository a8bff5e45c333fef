"""Batch norm: the statistics of an average, or of a draw, are those of the data under its weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.average import SWA, SWAG
from torchbayes.posterior import Gaussian, Weights, snapshot
from torchbayes.predict.batchnorm import recalibrate_batchnorm


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
    bank = recalibrate_batchnorm(
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
    bank = recalibrate_batchnorm(model, q, data(), samples=2, folder=f"{tmp_path}/bank")
    assert bank.folder is not None
    assert_calibrated(bank[1])


def test_refuses_what_cannot_be_repeated() -> None:
    model = network()
    q = Gaussian(snapshot(model), {})
    with pytest.raises(ValueError, match="used up by the first draw"):
        recalibrate_batchnorm(model, q, iter(data()))
    with pytest.raises(ValueError, match="samples is 0"):
        recalibrate_batchnorm(model, q, data(), samples=0)
    with pytest.raises(ValueError, match="does not have"):
        recalibrate_batchnorm(nn.Linear(3, 2), q, data())


@pytest.mark.parametrize("wrong", [torch.zeros(4, 3), {"x": torch.zeros(4, 3)}, 3])
def test_a_loader_is_iterated_over_batches(wrong: object) -> None:
    model = network()
    with pytest.raises(TypeError, match=r"expected batches, from a loader or in a list"):
        recalibrate_batchnorm(model, snapshot(model), wrong)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"expected batches, from a loader or in a list"):
        tb.predictive(model, spread(model), data()[0][0], recalibrate=wrong)  # type: ignore[arg-type]


def spread(model: nn.Module, name: str = "0.weight") -> Gaussian:
    weights = snapshot(model)
    return Gaussian(weights, {name: torch.full_like(weights[name], 0.5)})


@pytest.mark.parametrize("in_pieces", [False, True])
def test_predictions_with_statistics_of_each_draw(in_pieces: bool) -> None:
    """By hand: draw, run the training data through the draw, normalise by what comes out."""
    model = network()
    q, x = spread(model), data()[0][0]
    generator = torch.Generator().manual_seed(4)
    inputs = list(x.split(8)) if in_pieces else x
    options = {"max_memory": 1} if in_pieces else {}  # draws are not kept
    p = tb.predictive(model, q, inputs, 5, None, generator, recalibrate=data(), **options)
    generator.manual_seed(4)
    wanted = []
    for _ in range(5):
        draw = q.sample(generator)
        mean, variance = (torch.from_numpy(t).float() for t in statistics(draw))
        hidden = x @ draw["0.weight"].t() + draw["0.bias"]
        hidden = (hidden - mean) / (variance + 1e-5).sqrt()
        wanted.append((hidden.relu() @ draw["3.weight"].t() + draw["3.bias"]).softmax(1))
    torch.testing.assert_close(p.probs, torch.stack(wanted).mean(0), rtol=1e-4, atol=1e-6)
    bank = tb.recalibrate_batchnorm(model, q, data(), 5, generator=generator.manual_seed(4))
    torch.testing.assert_close(tb.predictive(model, bank, x, 5).probs, p.probs)  # and no warning


def test_draws_that_share_statistics_are_noticed_once_for_a_model() -> None:
    model, x = network(), data()[0][0]
    tb.predictive(model, spread(model), x, 2, recalibrate=False)
    with pytest.warns(UserWarning, match=r"same statistics of batch norm '1'.*recalibrate=batches"):
        tb.predictive(model, spread(model), x, 2)
    tb.predictive(model, spread(model), x, 2)  # warnings are errors here


def test_statistics_that_fit_the_draws_are_not_mentioned() -> None:
    model, x = network(), data()[0][0]
    tb.predictive(model, tb.Point(snapshot(model)), x)
    tb.predictive(model, Gaussian(snapshot(model), {}), x, 2)
    tb.predictive(model, spread(model, "3.weight"), x, 2)  # only after the batch norm
    samples = tb.Samples(model)
    samples.append()
    tb.predictive(model, samples, x)
    with_dropout = nn.Sequential(nn.Dropout(0.5), *network())
    net = tb.MCDropout(with_dropout)
    tb.predictive(with_dropout, net, x, 2)
    with pytest.raises(ValueError, match="there is nothing to re-estimate"):
        tb.predictive(with_dropout, net, x, 2, recalibrate=data())
