"""`Predictor`: its draws are those of `predictive`, made once; it may be shared, copied and pickled."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from tests.predict.test_threads import (
    POSTERIORS,
    assert_threads_agree,
    dropout,
    gaussian,
    network,
    numbers,
    samples,
    state,
)
from torchbayes.posterior import Posterior
from torchbayes.predict import passes
from torchbayes.predict.results import Predictive

pytestmark = pytest.mark.filterwarnings("ignore:all draws of this")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(count: int = 5) -> Tensor:
    return torch.randn(count, 3, generator=seeded(1))


@pytest.fixture(params=["together", "loop"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "loop":
        monkeypatch.setattr(passes, "_TOGETHER", 0)
    return str(request.param)


@pytest.mark.parametrize("make", POSTERIORS, ids=lambda make: make.__name__)
def test_it_predicts_as_predictive_does(make: Callable[[nn.Module], Posterior]) -> None:
    model = network()
    posterior, x = make(model), inputs()
    model.train()
    before = state(model)
    serve = tb.Predictor(model, posterior, 6, generator=seeded(7))
    expected = tb.predictive(model, posterior, x, 6, generator=seeded(7))
    torch.testing.assert_close(numbers(serve(x)), numbers(expected))
    assert torch.equal(numbers(serve(x)), numbers(serve(x)))
    loaded = serve([(x[:2], None), (x[2:], None)])
    torch.testing.assert_close(numbers(loaded), numbers(expected))
    assert serve.samples == expected.draws == 6
    assert state(model) == before


def test_the_answers_are_those_of_its_networks() -> None:
    model, x = network(), inputs()
    serve = tb.Predictor(model, gaussian(model), 6, generator=seeded(7))
    networks = serve.networks
    assert len(networks) == 6
    assert not any(net.training for net in networks)
    with torch.no_grad():
        probs = torch.stack([net(x).softmax(1) for net in networks]).mean(0)
    found = serve(x)
    assert isinstance(found, tb.ClassPredictive)
    torch.testing.assert_close(found.probs, probs)
    one, other = (dict(net.named_parameters()) for net in networks[:2])
    assert not torch.equal(one["first.weight"], other["first.weight"])
    assert one["twice.weight"] is dict(networks[0].named_parameters())["twice.weight"]
    model_state = networks[0].state_dict()
    assert torch.equal(model_state["tied.weight"], model_state["twice.weight"])


@pytest.mark.parametrize("make", [gaussian, samples, dropout], ids=lambda make: make.__name__)
def test_threads_get_the_answers_of_one_thread(make: Callable[[nn.Module], Posterior]) -> None:
    model = network()
    serve = tb.Predictor(model, make(model), 6, generator=seeded())
    rows = [inputs(8)[i : i + 2] for i in range(4)]

    def answer(seed: int) -> Predictive:
        return serve(rows[seed])

    assert_threads_agree(answer, model)


def test_further_training_does_not_change_it() -> None:
    model, x = network(), inputs()
    serve = tb.Predictor(model, gaussian(model), 4, generator=seeded())
    before = numbers(serve(x))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    assert torch.equal(numbers(serve(x)), before)


def test_weights_that_do_not_vary_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 2))
    model[0].requires_grad_(False)
    last = tb.Samples(model)
    for _ in range(3):
        nn.init.normal_(model[2].weight)
        last.append()
    serve = tb.Predictor(model, last)
    bodies = {net[0].weight.data_ptr() for net in serve.networks}  # type: ignore[index]
    assert bodies == {model[0].weight.data_ptr()}
    assert repr(serve) == "Predictor(3 draws of Sequential, 102 of 302 weights vary, Categorical)"


def test_it_can_be_pickled_and_copied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    serve, x = tb.Predictor(model, gaussian(model), 5, generator=seeded()), inputs()
    expected = numbers(serve(x))
    data = pickle.dumps(serve)
    assert len(data) < 2 * 5 * 4 * sum(p.numel() for p in model.parameters()) + (1 << 14)
    for twin in (pickle.loads(data), copy.deepcopy(serve)):
        assert torch.equal(numbers(twin(x)), expected)


def test_a_regression_and_other_outputs() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"other": x, "mean": super().forward(x)}

    torch.manual_seed(0)
    model, x = Pair(3, 1), inputs()
    noise, q = tb.GaussianNoise(0.3), gaussian(model)
    serve = tb.Predictor(model, q, 9, noise, seeded(), output="mean")
    found = serve(x)
    expected = tb.predictive(model, q, x, 9, noise, seeded(), output="mean")
    assert isinstance(found, tb.RegressionPredictive)
    assert isinstance(expected, tb.RegressionPredictive)
    torch.testing.assert_close(found.means, expected.means)
    torch.testing.assert_close(found.quantile(0.9), expected.quantile(0.9))


def test_batch_norm_statistics_of_each_draw() -> None:
    model, x = network(), inputs(40)
    q = gaussian(model)
    serve = tb.Predictor(model, q, 4, generator=seeded(), recalibrate=[x])
    expected = tb.predictive(model, q, x, 4, generator=seeded(), recalibrate=[x])
    torch.testing.assert_close(numbers(serve(x)), numbers(expected))
    means = [net.get_buffer("norm.running_mean") for net in serve.networks]
    assert not torch.equal(means[0], means[1])


class Forgets(nn.Linear):
    """Writes to a buffer and to a weight even in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        self.bias.data.mul_(0.5)
        return super().forward(x) * self.calls


def test_a_network_that_writes_to_itself_still_answers_the_same() -> None:
    torch.manual_seed(0)
    model, x = Forgets(), inputs()
    point = tb.Samples.of([model, copy.deepcopy(model)])
    serve = tb.Predictor(model, point)
    expected = copy.deepcopy(model)(x).softmax(1)
    for _ in range(3):
        found = serve(x)
        assert isinstance(found, tb.ClassPredictive)
        torch.testing.assert_close(found.probs, expected.detach())
    assert int(model.calls) == 0  # type: ignore[arg-type]
    assert torch.equal(point.mean()["bias"], model.bias)


def test_memory_is_bounded_and_pieces_are_joined(path: str) -> None:
    model, x = network(), inputs(300)
    q = gaussian(model)
    small = tb.Predictor(model, q, 6, generator=seeded(), max_memory=4000)
    torch.testing.assert_close(
        numbers(small(x)), numbers(tb.predictive(model, q, x, 6, generator=seeded()))
    )


def test_inputs_that_are_passed_whole() -> None:
    class Pool(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(0, keepdim=True)

    model = Pool(3, 2)
    serve = tb.Predictor(model, gaussian(model), 3, split=False)
    assert len(serve(inputs())) == 1


def test_wrong_arguments_and_inputs() -> None:
    model = network()
    with pytest.raises(ValueError, match="samples is 0: expected at least 1 draw"):
        tb.Predictor(model, gaussian(model), 0)
    with pytest.raises(ValueError, match="use the model that it was trained with"):
        tb.Predictor(nn.Linear(3, 7), gaussian(nn.Linear(3, 2)))
    serve = tb.Predictor(model, gaussian(model), 3)
    with pytest.raises(ValueError, match="there is nothing to predict"):
        serve(inputs(0))
    with pytest.raises(RuntimeError, match=r"cannot take the first example"):
        serve(torch.zeros(2, 9))
    assert math.isclose(float(serve(inputs(1)).probs.sum()), 1, rel_tol=1e-5)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="draws of a DropoutPosterior are no weights"):
        _ = tb.Predictor(model, dropout(model), 3).networks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_goes_on_using_it() -> None:
    model, x = network(), inputs()
    serve = tb.Predictor(model, gaussian(model), 4, generator=seeded())
    expected = numbers(serve(x))
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()

    def child() -> None:
        torch.set_num_threads(1)  # as in every process that is forked: OpenMP's threads are gone
        theirs.send(numbers(serve(x)).tolist())

    process = context.Process(target=child)
    process.start()
    assert mine.poll(60)
    assert torch.equal(torch.tensor(mine.recv()), expected)
    process.join(60)
