"""Posteriors made with a wrapped network fit the plain one and the other way round, whatever wraps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.core.names import named_weights
from torchbayes.posterior import digest_of_rest

from ..conformance.problems import blobs


class Net(nn.Module):
    def __init__(self, compiled_body: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            body: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
            self.body = torch.compile(body, backend="eager") if compiled_body else body
            self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


def lightning(net: nn.Module) -> nn.Module:
    module = pytest.importorskip("lightning").LightningModule

    class Task(module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x)
            return result

    return Task()


def lora(net: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["body.0"], modules_to_save=["head"])
    model: nn.Module = peft.get_peft_model(net, config)
    return model.requires_grad_(True)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda net: net,
    "compile": lambda net: torch.compile(net, backend="eager"),
    "compiled part": lambda net: Net(compiled_body=True),
    "data parallel": nn.DataParallel,
    "ddp": nn.parallel.DistributedDataParallel,
    "compiled ddp": lambda net: torch.compile(
        nn.parallel.DistributedDataParallel(net), backend="eager"
    ),
    "lightning": lightning,
}
every_wrapper = pytest.mark.parametrize("wrapper", list(WRAPPERS))


def wrapped(wrapper: str) -> Any:
    return WRAPPERS[wrapper](Net())


def trained(make: Callable[[Any], Any], model: Any) -> Any:
    x, y = blobs()
    optimizer = make(model)
    for _ in range(3):
        with optimizer.sampled():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer.posterior()


@every_wrapper
@pytest.mark.usefixtures("process_group")
def test_a_posterior_fits_every_wrapping(wrapper: str, tmp_path: Path) -> None:
    model, x = wrapped(wrapper), blobs()[0]
    make = lambda net: tb.IVON(net, train_size=240, generator=torch.Generator().manual_seed(1))  # noqa: E731
    posterior = trained(make, model)
    assert list(posterior.mean()) == list(tb.snapshot(Net()))
    assert posterior.model_name == ("Task" if wrapper == "lightning" else "Net")
    posterior.save(tmp_path / "q.safetensors")
    found = []
    for other in WRAPPERS:
        again = wrapped(other)
        q = tb.load(tmp_path / "q.safetensors", again)
        seed = torch.Generator().manual_seed(2)
        found.append(tb.predictive(again, q, x, 4, generator=seed, recalibrate=False).probs)  # type: ignore[attr-defined]
    assert all(torch.equal(probs, found[0]) for probs in found)
    twin = Net()
    names = {id(p): n for n, p in twin.named_parameters()}
    assert tb.IVON(twin, train_size=240)._names == names


@every_wrapper
@pytest.mark.usefixtures("process_group")
def test_the_same_update_and_the_same_file(wrapper: str) -> None:
    """VOGN looks into the layers, MAP has groups, a mean field calls the network with other weights."""
    model, plain = wrapped(wrapper), Net()
    for make in (
        lambda net: tb.VOGN(net, train_size=240, generator=torch.Generator().manual_seed(1)),
        lambda net: tb.NoisyKFAC(net, train_size=240, generator=torch.Generator().manual_seed(1)),
    ):
        one, two = trained(make, model), trained(make, plain)
        assert all(torch.equal(a, two.mean()[name]) for name, a in one.mean().items())
    assert tb.MAP(model, train_size=9).posterior().rest == ""
    assert len(tb.MAP(model, train_size=9).param_groups) == 2  # norm layers are known
    mean_field = tb.MeanField(model, generator=torch.Generator().manual_seed(3))
    twin = tb.MeanField(plain, generator=torch.Generator().manual_seed(3))
    x = blobs()[0]
    assert torch.equal(mean_field(x), twin(x))
    assert list(mean_field.posterior().std()) == list(twin.posterior().std())
    averager = tb.SWAG(model, params="head.*")
    averager.update()
    assert set(averager.mean()) >= {"head.weight", "head.bias"}
    layers = tb.MCDropout(model).layers
    assert layers == tb.MCDropout(plain).layers == ["body.0"]
    held = ["head.weight", "head.bias"]
    assert digest_of_rest(model, held) == digest_of_rest(plain, held)


def test_a_posterior_of_the_whole_network_fits_it_with_adapters() -> None:
    """LoRA's first adapters are 0, so that the network with them is the network without."""
    plain, x = Net(), blobs()[0]
    posterior = tb.Point(tb.snapshot(plain))
    adapted = lora(Net())
    assert set(posterior.mean()) <= named_weights(adapted).keys()
    nn.init.zeros_(adapted.base_model.model.body[0].base_layer.weight)
    adapted.requires_grad_(
        False
    )  # adapters that the posterior has no word on are not to be trained
    assert torch.equal(
        tb.predictive(adapted, posterior, x).probs,  # type: ignore[attr-defined]
        tb.predictive(plain, posterior, x).probs,  # type: ignore[attr-defined]
    )


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Net(), nn.LogSoftmax(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def test_an_unknown_wrapper_is_named() -> None:
    with pytest.raises(ValueError, match=r"fits its module 'inner\.0', so pass model\.inner\.0"):
        tb.Point(tb.snapshot(Net())).check(Holder())
    with pytest.raises(
        ValueError, match="a module that has this one as 'inner', so pass that module"
    ):
        tb.Point(tb.snapshot(Holder())).check(Holder().inner)
    with pytest.raises(ValueError, match="use the model that it was trained with"):
        tb.Point(tb.snapshot(Net())).check(nn.Linear(2, 3))


def test_a_module_of_the_users_that_is_called_module_is_not_a_wrapper() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.model = nn.Linear(1, 1), nn.Linear(1, 1)

    assert list(tb.snapshot(Own())) == [name for name, _ in Own().named_parameters()]
