"""Threads may share a network: every answer is the single-threaded one, and the network stays as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.posterior import Posterior
from torchbayes.predict import passes
from torchbayes.predict.results import Predictive

pytestmark = pytest.mark.filterwarnings("ignore:all draws of this")

THREADS, ANSWERS = 8, 80


class Net(nn.Module):
    """Has batch norm, dropout, a tied weight, a module at two places and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.twice, self.tied, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.again = self.twice
        self.tied.weight = self.twice.weight
        self.norm.register_forward_hook(lambda _module, _inputs, outputs: outputs.tanh())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.twice(self.drop(self.norm(self.first(x))))
        logits: Tensor = self.last(self.tied(self.again(hidden).relu()))
        return logits


def network() -> Net:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.norm.running_mean.normal_()  # type: ignore[union-attr]
    return model


def gaussian(model: nn.Module) -> Posterior:
    names = [name for name, _ in model.named_parameters()]
    mean = tb.snapshot(model)
    return tb.Gaussian(mean, {name: torch.full_like(mean[name], 0.3) for name in names})


def last_layer(model: nn.Module) -> Posterior:
    mean = tb.snapshot(model)
    return tb.Gaussian(mean, {"last.weight": torch.full_like(mean["last.weight"], 0.3)})


def samples(model: nn.Module) -> Posterior:
    bank, source = tb.Samples(model), gaussian(model)
    for seed in range(6):
        bank.append(source.sample(torch.Generator().manual_seed(seed)))
    return bank


def dropout(model: nn.Module) -> Posterior:
    return tb.MCDropout(model, p=0.5).posterior()


def own_dropout(model: nn.Module) -> Posterior:
    return tb.MCDropout(model).posterior()


def generated(model: nn.Module) -> Posterior:
    return tb.Hypernet(model).posterior()


def laplace(model: nn.Module) -> Posterior:
    data = (torch.randn(20, 3), torch.arange(20) % 4)
    return tb.Laplace(model.eval(), data, check=False).posterior()


def state(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return {
        name: (
            module.training,
            {leaf: id(t) for leaf, t in {**module._parameters, **module._buffers}.items()},
            [list(getattr(module, kind).items()) for kind in hooks],
            set(vars(module)),
        )
        for name, module in model.named_modules(remove_duplicate=False)
    }


def numbers(p: Predictive) -> Tensor:
    assert isinstance(p, tb.ClassPredictive)
    return torch.cat([p.probs, p.aleatoric.unsqueeze(1)], 1)


def assert_threads_agree(answer: Callable[[int], Predictive], model: nn.Module) -> None:
    expected = [numbers(answer(seed)) for seed in range(4)]
    before, bits = state(model), tb.snapshot(model)
    start = threading.Barrier(THREADS)

    def work(thread: int) -> list[bool]:
        start.wait(30)
        seeds = [(thread + number) % 4 for number in range(ANSWERS // THREADS)]
        return [torch.equal(numbers(answer(seed)), expected[seed]) for seed in seeds]

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(fine for answers in pool.map(work, range(THREADS)) for fine in answers)
    assert state(model) == before
    assert all(torch.equal(tensor, bits[n]) for n, tensor in tb.snapshot(model).items())


POSTERIORS = [gaussian, last_layer, samples, dropout, own_dropout, generated, laplace]


@pytest.mark.parametrize("vmapped", [False, True])
@pytest.mark.parametrize("make", POSTERIORS, ids=lambda make: make.__name__)
def test_predictive(
    make: Callable[[nn.Module], Posterior], vmapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_VMAP_BYTES", (1 << 40) * vmapped)
    model = network()
    posterior, x = make(model), torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    model.train()

    def answer(seed: int) -> Predictive:
        return tb.predictive(model, posterior, x, 6, generator=torch.Generator().manual_seed(seed))

    assert_threads_agree(answer, model)


def test_a_loader_and_statistics_of_each_draw() -> None:
    model = network().train()
    posterior, x = gaussian(model), torch.randn(9, 3, generator=torch.Generator().manual_seed(1))

    def answer(seed: int) -> Predictive:
        generator = torch.Generator().manual_seed(seed)
        return tb.predictive(
            model, posterior, [x[:4], x[4:]], 3, generator=generator, recalibrate=[x]
        )

    assert_threads_agree(answer, model)


def test_linearised_laplace() -> None:
    model, x = network().eval(), torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    la = tb.Laplace(model, (x, torch.arange(20) % 4), check=False)

    def answer(seed: int) -> Predictive:
        return la.predictive(x[:5], generator=torch.Generator().manual_seed(seed))

    assert_threads_agree(answer, la.model)


def test_a_last_layer_in_closed_form() -> None:
    model = network()
    net = tb.VBLL(model, train_size=20).train()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))

    def answer(seed: int) -> Predictive:
        return net.predictive(x, 10, torch.Generator().manual_seed(seed))

    assert_threads_agree(answer, net)


def test_a_generator_in_common_ends_where_it_would_in_one_thread() -> None:
    """And one that the caller passes twice gives other draws the second time."""
    model, x = network(), torch.randn(5, 3)
    posterior = gaussian(model)
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    first = tb.predictive(model, posterior, x, 4, generator=one)
    second = tb.predictive(model, posterior, x, 4, generator=one)
    assert not torch.equal(numbers(first), numbers(second))
    for _ in range(8):
        posterior.sample(other)
    assert torch.equal(one.get_state(), other.get_state())
