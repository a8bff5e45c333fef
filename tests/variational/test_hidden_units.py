"""Steps of W2's units that are taken later, against SGD on the dense gradient, and who uses W2 meanwhile."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import torchbayes as tb
from torchbayes.core import names
from torchbayes.core.workspace import Workspace
from torchbayes.models import mlp
from torchbayes.variational import HypernetSGD
from torchbayes.variational.hidden_units import HiddenUnits

# 280 × 280 weights are enough for updates by unit; the layer before has fewer.
WIDTH = 280
LARGE = "layers.2.weight"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(seed: int = 0, latent: Any = tb.latents.normal) -> tb.Hypernet:
    torch.manual_seed(seed)
    model = mlp(20, hidden=(WIDTH, WIDTH))
    return tb.Hypernet(model, latent=latent, latent_dim=4, hidden_dim=10, generator=seeded(1))


def train(net: tb.Hypernet, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        x = torch.randn(16, 20, generator=seeded(step))
        optimizer.zero_grad()
        F.cross_entropy(net(x), torch.arange(16) % 10).backward()
        optimizer.step()


def left(net: tb.Hypernet) -> int:
    """Count the units that are behind."""
    return sum(units.behind for units in net.units.values())


def w2(net: nn.Module) -> nn.Parameter:
    """Return W2 of the large layer; nothing has used it by that."""
    return net.get_submodule("second.layers.2")._parameters["weight"]  # type: ignore[return-value]


def use(net: tb.Hypernet) -> None:
    w2(net).sum()
    assert left(net) == 0


def trained(settings: dict[str, Any] | None = None) -> tuple[tb.Hypernet, HypernetSGD]:
    """Return a network with units behind, and its optimiser."""
    net = make()
    optimizer = HypernetSGD(net, **{"lr": 0.002, "train_size": 100} | (settings or {}))
    train(net, optimizer, 5)
    assert left(net) > 0
    return net, optimizer


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("steps", [7, 70])
def test_units_take_the_steps_of_dense_sgd(steps: int, nesterov: bool) -> None:
    """NumPy in double precision; units are off in half of the steps, and settings change."""
    rng = np.random.default_rng(0)
    shape, h = (40, 500), 12
    w, v = rng.normal(size=(h, *shape)), rng.normal(size=(h, *shape)) * 0.1
    weight, momentum = (torch.tensor(x, dtype=torch.float32) for x in (w, v))
    units = HiddenUnits(Workspace())
    out = torch.full(shape, float("nan"))
    behind = 0
    for step in range(steps):
        a = np.maximum(rng.normal(size=h), 0)
        activation = torch.tensor(a, dtype=torch.float32)
        g = rng.normal(size=shape)
        alpha, mu, decay = 0.1 / (step + 1), 0.9, 0.01 * (step % 3)
        units.draw(weight, activation, out)
        np.testing.assert_allclose(out.numpy(), np.tensordot(a, w, 1), rtol=1e-3, atol=1e-4)
        back = units.step(
            weight, momentum, torch.tensor(g, dtype=torch.float32), activation,
            alpha=alpha, mu=mu, decay=decay, nesterov=nesterov,
        )  # fmt: skip
        expected = np.tensordot(w, g, 2) * (a > 0)
        np.testing.assert_allclose(back.numpy(), expected, rtol=1e-3, atol=2e-2)
        d = a[:, None, None] * g + decay * w
        v = mu * v + d
        w = w - alpha * (d + mu * v if nesterov else v)
        behind = max(behind, units.behind)
    assert behind > 2
    np.testing.assert_allclose(weight.numpy(), w, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(momentum.numpy(), v, rtol=1e-3, atol=1e-4)


def test_when_the_steps_are_taken_changes_no_bit() -> None:
    often, rarely = make(), make()
    optimizers = [HypernetSGD(net, 0.002, train_size=100) for net in (often, rarely)]
    for step in range(6):
        for net, optimizer in zip((often, rarely), optimizers, strict=True):
            train(net, optimizer, 1, step)
        use(often)
    assert left(rarely) > 0
    for one, two in zip(often.parameters(), rarely.parameters(), strict=True):
        assert torch.equal(one, two)


def equal_but_draws(plain: tb.Hypernet, fast: tb.Hypernet) -> None:
    """Compare all parameters but those that hold a draw in one of the two."""
    for (name, one), (_, two) in zip(
        plain.named_parameters(), fast.named_parameters(), strict=True
    ):
        if name.partition(".")[0] != "model" or name.partition(".")[2] not in plain.groups:
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_large_layers_equal_plain_sgd(momentum: float) -> None:
    plain, fast = make(), make()
    settings: dict[str, Any] = {"lr": 0.002, "momentum": momentum, "nesterov": momentum > 0}
    train(plain, torch.optim.SGD(plain.parameters(), weight_decay=0.05, **settings), 8)
    train(fast, HypernetSGD(fast, train_size=100, prior=5.0, **settings), 8)
    assert bool(fast.units) == (momentum > 0)
    equal_but_draws(plain, fast)


CHANGES: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.0005},
    "momentum": {"momentum": 0.5},
    "no momentum": {"momentum": 0.0, "nesterov": False},
    "weight decay": {"weight_decay": 0.5},
    "maximize": {"maximize": True},
    "plain momentum": {"nesterov": False},
}


@pytest.mark.parametrize("when", ["from the start", "for some steps"])
@pytest.mark.parametrize("change", CHANGES)
def test_settings_that_change_equal_plain_sgd(change: str, when: str) -> None:
    first, then = (4, 0) if when == "from the start" else (4, 4)
    plain, fast = make(), make()
    given: dict[str, Any] = {"lr": 0.002, "momentum": 0.9, "nesterov": True}
    for net, optimizer in (
        (plain, torch.optim.SGD(plain.parameters(), weight_decay=0.05, **given)),
        (fast, HypernetSGD(fast, train_size=100, prior=5.0, **given)),
    ):
        if then:
            train(net, optimizer, first)
        before = [dict(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update(CHANGES[change])
        train(net, optimizer, 4, first)
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.update(old)
        train(net, optimizer, then, first + 4)
    equal_but_draws(plain, fast)
    assert w2(fast).is_contiguous()


@pytest.mark.parametrize("lr", [None, 0.002])
def test_climbing_is_descending_on_the_negative(lr: float | None) -> None:
    """With the same prior, bit by bit."""
    nets = make(), make()
    for sign, net in zip((1, -1), nets, strict=True):
        optimizer = HypernetSGD(net, lr, train_size=100, prior=50.0, steps=8)
        for group in optimizer.param_groups:
            group["maximize"] = sign < 0
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(16, 20, generator=seeded(step))
            (sign * F.cross_entropy(net(x), torch.arange(16) % 10)).backward()
            optimizer.step()
    for one, two in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_resumes_bit_by_bit_with_units_behind() -> None:
    one, whole = make(), make()
    optimizer, other = (HypernetSGD(net, train_size=100, steps=20) for net in (one, whole))
    train(one, optimizer, 5)
    train(whole, other, 10)
    assert left(one) > 0
    two = make(7)
    again = HypernetSGD(two, train_size=100, steps=20)
    train(two, again, 2)  # what it has left must not spoil what is loaded
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    train(two, again, 5, 5)
    for one_, two_ in zip(whole.parameters(), two.parameters(), strict=True):
        assert torch.equal(one_, two_)


def applied(net: nn.Module) -> Tensor:
    found = []
    net.apply(lambda module: found.append(module._parameters.get("weight")))
    return next(p for p in found if p is not None and p.shape == w2(net).shape)


def in_hook(net: tb.Hypernet) -> Tensor:
    found: list[Tensor] = []
    with net.model.register_forward_pre_hook(lambda *_: found.append(w2(net).clone())):
        net(torch.zeros(2, 20))
    return found[0]


def saved(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def averaged(net: tb.Hypernet, kind: type) -> Tensor:
    average = kind(net)
    (average.update_parameters if kind is AveragedModel else lambda _: average.update())(net)
    return w2(average.module) if kind is AveragedModel else average.mean()[f"second.{LARGE}"]


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        return p.clone()


def faked(p: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        mode.from_tensor(p)
    return p.detach()


def on_a_device(net: tb.Hypernet) -> Tensor:
    with torch.device("meta"):
        return w2(net).clone()


KEY = f"second.{LARGE}"
READERS: dict[str, Callable[[tb.Hypernet], Tensor]] = {
    "second": lambda net: net.second.get_parameter(LARGE),
    "parameters": lambda net: dict(net.named_parameters())[KEY],
    "children": lambda net: dict(dict(net.named_children())["second"].named_parameters())[LARGE],
    "_modules": lambda net: net._modules["second"].get_parameter(LARGE),  # type: ignore[union-attr]
    "apply": applied,
    "hook": in_hook,
    "state_dict": lambda net: net.state_dict()[KEY],
    "of a whole": lambda net: nn.Sequential(net).state_dict()[f"0.{KEY}"],
    "deepcopy": lambda net: w2(copy.deepcopy(net)),
    "copy": lambda net: w2(copy.copy(net)),
    "copy of it": lambda net: copy.deepcopy(w2(net)),
    "pickle": lambda net: w2(pickle.loads(pickle.dumps(net))),
    "another process": lambda net: w2(pickle.loads(ForkingPickler.dumps(net))),
    "it in another process": lambda net: pickle.loads(ForkingPickler.dumps(w2(net))),
    "share_memory": lambda net: w2(net.share_memory()),
    "torch.save": lambda net: saved(net.state_dict())[KEY],
    "torch.save of it": lambda net: saved(w2(net)),
    "safetensors": lambda net: safetensors.torch.load(safetensors.torch.save(net.state_dict()))[KEY],
    "double": lambda net: w2(net.double()).float(),
    "to": lambda net: w2(net.to(torch.float64)).float(),
    "posterior": lambda net: net.posterior()._second[LARGE].movedim(-1, 0).contiguous(),
    "generate": lambda net: net.generate(dict.fromkeys(net.latents(), torch.ones(4)))[LARGE],
    "functional_call": lambda net: torch.func.functional_call(
        net.eval(), {"first.layers.2.weight": torch.ones(10, 4)}, torch.ones(2, 20)
    ),
    "named_weights": lambda net: names.named_weights(net)[KEY],
    "named_parameters": lambda net: names.named_parameters(net)[KEY],
    "snapshot": lambda net: tb.snapshot(net)[KEY],
    "Point": lambda net: tb.posterior.Point(tb.snapshot(net)).mean()[KEY],
    "SWA": lambda net: averaged(net, tb.SWA),
    "SWAG": lambda net: averaged(net, tb.SWAG),
    "AveragedModel": lambda net: averaged(net, AveragedModel),
    "parameters_to_vector": lambda net: parameters_to_vector(
        p for p in net.parameters() if p.shape == w2(net).shape
    ),
    "prune": lambda net: prune.l1_unstructured(net.second.get_submodule("layers.2"), "weight", 0.5).weight,
    "parametrize": lambda net: parametrize.register_parametrization(
        net.second.get_submodule("layers.2"), "weight", nn.Identity()
    ).weight,
    "data": lambda net: w2(net).data,
    "numpy": lambda net: torch.from_numpy(w2(net).detach().numpy()),
    "dlpack": lambda net: torch.from_dlpack(w2(net).detach()),
    "list": lambda net: torch.tensor(w2(net).tolist()),
    "text": lambda net: torch.tensor(list(repr(w2(net).flatten()[-9:]).encode())),
    "foreach": lambda net: torch._foreach_add([w2(net)], 0.0)[0],
    "out": lambda net: torch.add(torch.zeros_like(w2(net)), 0, out=w2(net).detach()),
    "operator": lambda net: torch.ops.aten.clone.default(w2(net)),
    "function": lambda net: Copied.apply(w2(net)),
    "compile": lambda net: torch.compile(lambda p: p + 0.0, backend="eager")(w2(net)),
    "vmap": lambda net: torch.func.vmap(lambda x: x * w2(net))(torch.ones(2))[1],
    "grad": lambda net: torch.func.grad(lambda x: (x * w2(net)).sum())(torch.ones_like(w2(net))),
    "fake tensors": lambda net: faked(w2(net)),
    "on a device": on_a_device,
    "inference mode": lambda net: torch.inference_mode()(lambda: w2(net).clone())(),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_w2_sees_all_steps(reader: str) -> None:
    settled, net = trained()[0], trained()[0]
    use(settled)
    expected, found = READERS[reader](settled), READERS[reader](net)
    assert torch.equal(expected, found)
    assert left(net) == 0
    assert type(found) in (Tensor, nn.Parameter)
    assert found.is_contiguous()


def test_a_kept_parameter_is_up_to_date() -> None:
    net = make()
    kept, module = w2(net), net.second
    optimizer = HypernetSGD(net, 0.002, train_size=100)
    train(net, optimizer, 5)
    settled = trained()[0]
    assert left(net) > 0
    assert torch.equal(kept.clone(), w2(settled).clone())
    assert left(net) == 0
    train(net, optimizer, 2, 5)
    assert left(net) > 0
    assert module.get_parameter(LARGE) is kept
    assert torch.equal(kept, w2(net))


MOMENTUM: dict[str, Callable[[HypernetSGD, Tensor], Tensor]] = {
    "state": lambda optimizer, own: optimizer.state[own]["second"],
    "state_dict": lambda optimizer, own: optimizer.state_dict()["state"][0]["second"],
    "torch.save": lambda optimizer, own: saved(optimizer.state_dict())["state"][0]["second"],
    "copy": lambda optimizer, own: copy.deepcopy(optimizer.state_dict())["state"][0]["second"],
}  # fmt: skip


@pytest.mark.parametrize("reader", MOMENTUM)
def test_whoever_reads_the_momentum_sees_all_steps(reader: str) -> None:
    found = []
    for settle in (True, False):
        net = make()
        own = net.model.get_parameter(LARGE)
        optimizer = HypernetSGD(net, 0.002, train_size=100)
        optimizer.param_groups[0]["params"].sort(key=lambda p: p is not own)
        train(net, optimizer, 5)
        assert left(net) > 0
        if settle:
            use(net)
        found.append(MOMENTUM[reader](optimizer, own) + 0)
        assert left(net) == 0
    assert torch.equal(*found)


@torch.no_grad()
def halved(module: nn.Module) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.mul_(0.5)


def loaded(net: tb.Hypernet) -> None:
    net.load_state_dict(make(3).state_dict())


def through_state_dict(net: tb.Hypernet) -> None:
    for value in net.state_dict().values():
        if value.is_floating_point():
            value.mul_(0.5)


def through_a_vector(net: tb.Hypernet) -> None:
    vector_to_parameters(parameters_to_vector(net.parameters()).detach() * 0.5, net.parameters())


def pruned(net: tb.Hypernet) -> None:
    prune.remove(
        prune.l1_unstructured(net.second.get_submodule("layers.2"), "weight", 0.5), "weight"
    )


WRITERS: dict[str, Callable[[tb.Hypernet], Any]] = {
    "apply": lambda net: net.apply(halved),
    "children": lambda net: [child.apply(halved) for child in net.children()],
    "init": lambda net: nn.init.constant_(w2(net), 0.01),
    "data": lambda net: w2(net).data.mul_(0.5),
    "other data": lambda net: setattr(w2(net), "data", w2(net).detach().clone().mul_(0.5)),
    "load_state_dict": loaded,
    "state_dict": through_state_dict,
    "vector_to_parameters": through_a_vector,
    "prune": pruned,
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_writes_w2_has_the_last_word(writer: str) -> None:
    nets = []
    for settle in (True, False):
        net, optimizer = trained()
        if settle:
            use(net)
        WRITERS[writer](net)
        written = w2(net).detach().clone()
        use(net)
        assert torch.equal(written, w2(net))
        train(net, optimizer, 3, 5)
        nets.append(net)
    assert not torch.equal(written, w2(nets[0]))
    for one, two in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_clipping_leaves_units_behind() -> None:
    """Gradients and shapes are not values: what is done in every step costs nothing."""
    net, _ = trained()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    nn.utils.clip_grad_value_(net.parameters(), 1.0)
    net.zero_grad()
    assert [
        name for name, p in net.named_parameters() if p.requires_grad and p.shape == w2(net).shape
    ]
    assert left(net) > 0


def test_another_w2_in_its_place() -> None:
    """The one that was there gets its own steps, and the new one no others'."""
    nets = []
    for settle in (True, False):
        net, optimizer = trained()
        old = w2(net)
        if settle:
            use(net)
        new = nn.Parameter(torch.full(old.shape, 0.01))
        net.second.get_submodule("layers.2")._parameters["weight"] = new
        train(net, optimizer, 3, 5)
        nets.append((old, new))
    for one, two in zip(*nets, strict=True):
        assert torch.equal(one, two)


def test_two_networks_with_one_w2() -> None:
    """Each finds it after the steps of the other."""
    found = []
    for settle in (True, False):
        one, optimizer = trained()
        two = copy.copy(one)
        again = HypernetSGD(two, 0.002, train_size=100)
        assert w2(one) is w2(two)
        for step in range(5, 9):
            for net, own in ((one, optimizer), (two, again)):
                train(net, own, 1, step)
                if settle:
                    use(net)
        found.append(w2(one))
    assert torch.equal(*found)


def test_memory_that_processes_share_is_never_behind() -> None:
    net, optimizer = trained()
    net.share_memory()
    assert left(net) == 0
    train(net, optimizer, 3, 5)
    assert left(net) == 0
    assert w2(net).is_shared()


@contextmanager
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_a_thread_that_reads_disturbs_no_training() -> None:
    alone, watched = make(), make()
    optimizers = [HypernetSGD(net, 0.002, train_size=100) for net in (alone, watched)]
    train(alone, optimizers[0], 20)
    done = threading.Event()
    reads = []

    def read() -> None:
        while not done.is_set():
            reads.append(float(w2(watched).detach()[0, 0, 0]))

    thread = threading.Thread(target=read)
    with switching_often():
        thread.start()
        train(watched, optimizers[1], 20)
        done.set()
        thread.join()
    assert len(reads) > 20
    for one, two in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, two)


def test_goes_on_in_another_precision() -> None:
    net = make()
    optimizer = HypernetSGD(net, 0.002, train_size=100)
    train(net, optimizer, 3)
    assert net.units
    net.double()
    optimizer.load_state_dict(optimizer.state_dict())  # its tensors follow the parameters'
    x = torch.randn(16, 20, generator=seeded(9)).double()
    before = next(net.second.parameters()).detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(x), torch.arange(16) % 10).backward()
        optimizer.step()
    assert not net.units
    assert not torch.equal(before, next(net.second.parameters()))


def test_the_network_keeps_steps_of_an_optimiser_that_is_gone() -> None:
    nets = make(), make()
    kept = HypernetSGD(nets[0], 0.002, train_size=100)
    train(nets[0], kept, 5)
    train(nets[1], HypernetSGD(nets[1], 0.002, train_size=100), 5)
    for one, two in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, two)
