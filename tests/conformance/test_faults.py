"""What fails in training leaves what it does not own as it was, or is named before training starts."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from torchbayes.train.chains import SamplerMethod
from torchbayes.train.registry import METHODS

from .faults import Failed, FailingLogger, FailingNet, Plan, Watching, surroundings
from .problems import blobs, small_net

every_method = pytest.mark.parametrize("method", list(METHODS))
PLACES = ["forward", "backward", "transform", "logger", "evaluation", "progress"]
_GENERATED = (
    "hypernet",
)  # writes draws into the network's weights, which are nothing by themselves


@every_method
@pytest.mark.parametrize("where", PLACES)
def test_an_exception_leaves_everything_as_it_was(
    method: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "torchbayes")
    data = blobs(64)
    chances: list[tuple[bool, int, type[BaseException]]]
    chances = [(False, 2, Failed), (True, 3, KeyboardInterrupt)]
    for in_place, at, error in chances:
        plan = Plan(where, at, error)
        torch.manual_seed(0)
        network = FailingNet(plan)
        before, weights = surroundings(network), tb.snapshot(network)
        seen = Watching(plan, network)

        def transform(inputs: Tensor, _: torch.Generator, plan: Plan = plan) -> Tensor:
            plan.passes("transform")
            return inputs

        with pytest.raises(error):
            tb.fit(
                network, data, method, epochs=3, batch_size=32, progress=seen, transform=transform,
                logger=FailingLogger(plan), validation=data, in_place=in_place,
            )  # fmt: skip
        after = surroundings(network)
        changed = [key for key in before if before[key] != after[key]]
        assert not changed
        now = tb.snapshot(network)
        if not in_place:
            assert all(torch.equal(now[name], weights[name]) for name in weights)
        elif seen.weights and method not in _GENERATED:
            assert all(torch.equal(now[n], w) for n, w in seen.weights.items() if n in now)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).to(torch.complex64) @ self.turn).real)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.mixing = nn.Parameter(torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sparse.mm(self.mixing, self.first(x).T).T)


class HalfLayer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 8), nn.Linear(8, 8).to(dtype)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.middle(F.relu(self.first(x)).to(self.middle.weight.dtype))
        return self.last(middle.to(x.dtype))


class Whole(nn.Module):
    """Has an integer parameter, which nothing can train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.factor = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.factor / 8)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex": (Complex, "'turn' is complex64, and only real weights"),
    "sparse": (Sparse, "'mixing' of Sparse is a sparse tensor"),
    "float16": (lambda: small_net().half(), r"'0\.weight' is float16, in which small steps"),
    "bfloat16": (lambda: small_net().bfloat16(), r"'0\.weight' is bfloat16, in which small steps"),
    "a float16 layer": (lambda: HalfLayer(torch.float16), r"'middle\.weight' is float16"),
}


@every_method
@pytest.mark.parametrize("kind", list(REFUSED))
def test_types_that_cannot_be_trained_are_named_before_the_first_step(
    method: str, kind: str
) -> None:
    make, sentence = REFUSED[kind]
    with pytest.raises(TypeError, match=sentence):
        tb.fit(make, blobs(), method, epochs=1, progress=False)


@every_method
@pytest.mark.parametrize("make", [Complex, lambda: HalfLayer(torch.bfloat16), Whole])
def test_other_types_may_be_frozen(
    method: str, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def frozen() -> nn.Module:
        torch.manual_seed(0)
        network = make()
        for name, p in network.named_parameters():
            p.requires_grad_(name.partition(".")[0] in ("first", "last"))
        return network

    run = tb.fit(frozen, blobs(), method, epochs=1, progress=False, folder=tmp_path)
    probs = run.predict(blobs()[0], samples=2).probs
    assert torch.isfinite(probs).all()
    tb.load(tmp_path / "posterior.safetensors", frozen())


@every_method
def test_sparse_gradients_work_or_are_refused_before_the_first_step(method: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.middle = nn.Embedding(11, 8, sparse=True), nn.Linear(8, 8)
            self.last = nn.Linear(8, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.last(F.relu(self.middle(self.words(tokens).mean(1))))

    tokens = torch.randint(0, 11, (32, 5), generator=torch.Generator().manual_seed(0))
    data = tokens, torch.arange(32) % 3
    if isinstance(METHODS[method], type) and issubclass(METHODS[method], SamplerMethod):
        run = tb.fit(Words, data, method, epochs=1, progress=False)
        assert torch.isfinite(run.predict(tokens, samples=2).probs).all()
        return
    with pytest.raises(
        ValueError, match=r"'words\.weight' belongs to an embedding with sparse=True"
    ):
        tb.fit(Words, data, method, epochs=1, progress=False)


@every_method
def test_a_gradient_that_is_not_finite_is_an_error_with_step_and_layer(method: str) -> None:
    class Broken(torch.autograd.Function):
        count = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            Broken.count += 1
            return gradient * torch.nan if Broken.count >= 4 else gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Broken.apply(F.relu(self.first(x))))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "training broke down .*goes back")  # it is tried again
        with pytest.raises(tb.TrainingError, match=r"step [0-9]+ .*first\.weight") as caught:
            tb.fit(Net, blobs(), method, epochs=4, batch_size=120, progress=False)
    assert caught.value.step in (2, 3, 4)


@every_method
def test_a_last_batch_of_one_with_batch_norm(method: str, caplog: pytest.LogCaptureFixture) -> None:
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)
        )

    caplog.set_level(logging.INFO, "torchbayes")
    data = blobs(65)
    options: dict[str, Any] = {"epochs": 2, "progress": False}
    run = tb.fit(network, data, method, batch_size=32, **options)
    assert len([r for r in caplog.records if "it is left out" in r.message]) == 1
    assert len(run.history) >= 2
    assert torch.isfinite(run.predict(data[0], samples=2).probs).all()
    whole = tb.fit(network, data, method, batch_size=65, **options)  # and no batch of one, no note
    assert len([r for r in caplog.records if "it is left out" in r.message]) == 1
    assert torch.isfinite(whole.predict(data[0], samples=2).probs).all()
    loader = DataLoader(TensorDataset(*data), batch_size=32)
    with pytest.raises(ValueError, match="batches of one: give the DataLoader drop_last=True"):
        tb.fit(network, loader, method, **options)
    with pytest.raises(ValueError, match="give a batch_size of at least 2"):
        tb.fit(network, data, method, batch_size=1, **options)


def test_a_stream_with_a_batch_of_one_is_told_so() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    x, y = blobs(65)

    def batches() -> Any:
        yield x[:32], y[:32]
        yield x[32:33], y[32:33]

    with pytest.raises(ValueError, match="batch 2 of epoch 1, or a piece of it, has no more"):
        tb.fit(network, batches, epochs=1, train_size=64, progress=False)


def test_a_convolution_with_batch_norm_takes_one_image() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
    data = torch.randn(9, 1, 8, 8), torch.arange(9) % 3
    before = tb.snapshot(network)
    run = tb.fit(network, data, epochs=1, batch_size=4, progress=False)
    assert int(run.model[1].num_batches_tracked) == 3
    assert int(before["1.num_batches_tracked"]) == 0


def _wrapper(kind: str, model: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, y = blobs(32)
    generator = torch.Generator().manual_seed(1)

    def plain(net: nn.Module) -> Tensor:
        return F.cross_entropy(net(x), y)

    if kind == "MeanField":
        mean_field = tb.MeanField(model, generator=generator)
        return mean_field, lambda net: plain(net) + net.kl() / 32  # type: ignore[operator]
    if kind == "Hypernet":
        return tb.Hypernet(model, generator=generator), plain
    if kind == "VBLL":
        return tb.VBLL(model, train_size=32), lambda net: net.loss(x, y)  # type: ignore[operator]
    return tb.MCDropout(model), plain


def _train(net: nn.Module, optimizer: Any, loss: Any, averager: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()
        averager.update()


@pytest.mark.parametrize("average", [tb.SWA, tb.SWAG, tb.HWA])
@pytest.mark.parametrize("kind", ["MeanField", "Hypernet", "VBLL", "MCDropout"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_of_wrappers_and_averagers_go_on_as_the_original(
    kind: str, average: Any, duplicate: Callable[[Any], Any]
) -> None:
    if average is tb.HWA and kind != "MeanField":
        return
    torch.manual_seed(0)
    net, loss = _wrapper(kind, small_net())
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    averager = average(net)
    _train(net, optimizer, loss, averager, 3)
    twin, its, other = duplicate((net, optimizer, averager))
    alone = duplicate(averager)
    before = [p.detach().clone() for p in net.parameters()]
    state = torch.get_rng_state()
    _train(twin, its, loss, other, 3)
    assert all(map(torch.equal, before, net.parameters()))
    torch.set_rng_state(state)
    _train(net, optimizer, loss, averager, 3)
    assert all(map(torch.equal, twin.parameters(), net.parameters()))
    assert all(map(torch.equal, averager.mean().values(), other.mean().values()))
    assert len(alone) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = [n.posterior().sample(torch.Generator().manual_seed(0)) for n in (net, twin)]
    assert all(map(torch.equal, draws[0].values(), draws[1].values()))
