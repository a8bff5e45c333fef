"""VOGN, OGN, IVON, K-FAC and Noisy K-FAC as optimisers in someone's training loop."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes.optim.ivon import IVON
from torchbayes.optim.kfac import KFAC
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.optim.noisy_kfac import NoisyKFAC
from torchbayes.optim.ogn import OGN
from torchbayes.optim.vogn import VOGN
from torchbayes.posterior import Gaussian, Posterior
from torchbayes.prior import GaussianPrior, ScaleMixturePrior

N = 48
ALL = {"vogn": VOGN, "ogn": OGN, "ivon": IVON, "kfac": KFAC, "noisy-kfac": NoisyKFAC}
RANDOM = ("vogn", "ivon", "noisy-kfac")
every = pytest.mark.parametrize("name", ALL)
every_random = pytest.mark.parametrize("name", RANDOM)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip


def data(count: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 2, 5, 5, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long() + torch.arange(count) % 2


def make(name: str, net: nn.Module, lr: float = 1e-2, **options: object) -> WeightOptimizer:
    if name in RANDOM:
        options.setdefault("generator", torch.Generator().manual_seed(7))
    return ALL[name](net, lr, train_size=N, **options)


def closure_of(
    net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    return closure


def train(net: nn.Module, optimizer: WeightOptimizer, steps: int, first: int = 0) -> list[float]:
    x, y = data()
    losses = []
    for step in range(first, first + steps):
        part = slice(16 * (step % 3), 16 * (step % 3) + 16)
        losses.append(float(optimizer.step(closure_of(net, optimizer, x[part], y[part]))))
    return losses


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@every
def test_trains(name: str) -> None:
    net = network()
    options = {"lr": 0.3, "initial_curvature": 1.0} if name == "ivon" else {"damping": 1e-3}
    losses = train(net, make(name, net, **options), 90)
    assert sum(losses[-6:]) < 0.7 * sum(losses[:6])


@every
def test_an_exception_inside_leaves_the_mean_and_the_state(name: str) -> None:
    net, twin = network(), network()
    optimizer, other = make(name, net), make(name, twin)
    train(net, optimizer, 3)
    train(twin, other, 3)
    before = weights(net)
    generator = optimizer.generator.get_state()

    def broken() -> Tensor:
        net(data()[0]).mean().backward()
        raise KeyError("broken")

    with pytest.raises(KeyError):
        optimizer.step(broken)
    buffers = ("running", "tracked")  # batch norm has seen the batch
    after = weights(net)
    assert_equal(
        {k: v for k, v in before.items() if not any(b in k for b in buffers)},
        {k: v for k, v in after.items() if not any(b in k for b in buffers)},
    )
    # And the next step is what it would have been.
    net.load_state_dict(before)
    optimizer.generator.set_state(generator)
    train(net, optimizer, 2, first=3)
    train(twin, other, 2, first=3)
    assert_equal(weights(net), weights(twin))


@every
def test_resume_is_bit_equal(name: str) -> None:
    net = network()
    optimizer = make(name, net, mc_samples=2) if name in RANDOM else make(name, net)
    train(net, optimizer, 3)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(net, optimizer, 4, first=3)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = network(seed=1)
    resumed = make(name, again, lr=99.0)
    if name in RANDOM:
        resumed.mc_samples = 2
    again.load_state_dict(saved["net"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, 4, first=3)
    assert_equal(weights(net), weights(again))
    p = net[0].weight
    assert optimizer.state[p]["step"] == 7


@every
def test_schedulers_and_groups(name: str) -> None:
    net = network()
    groups = [{"params": net[4:].parameters(), "lr": 0.02}, {"params": net[0].parameters()}]
    optimizer = make(name, net, params=groups)
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.01]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    norm = net[1].weight.clone()
    first = net[0].weight.clone()
    for step in range(4):
        train(net, optimizer, 1, first=step)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    assert torch.equal(net[1].weight, norm)  # in no group
    assert not torch.equal(net[0].weight, first)
    optimizer.add_param_group({"params": net[1].parameters(), "lr": 0.01})
    train(net, optimizer, 2)
    assert not torch.equal(net[1].weight, norm)
    with pytest.raises(ValueError, match="not one of Sequential's"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 3


@every
def test_frozen_and_unused_weights_stay(name: str) -> None:
    net = network()
    net.unused = nn.Linear(3, 3)
    net.forward = lambda x: nn.Sequential(*list(net)[:7])(x)
    net[0].weight.requires_grad_(False)
    optimizer = make(name, net, params=list(net.parameters()))
    frozen, unused = net[0].weight.clone(), net.unused.weight.clone()
    seen = []
    handle = net[0].register_forward_pre_hook(lambda m, _: seen.append(m.weight.clone()))
    train(net, optimizer, 3)
    handle.remove()
    assert all(torch.equal(s, frozen) for s in seen)
    assert torch.equal(net[0].weight, frozen)
    assert torch.equal(net.unused.weight, unused)
    optimizer.posterior().check(net)
    # Thawed later, it is trained like the others.
    net[0].weight.requires_grad_(True)
    if name not in ("kfac", "noisy-kfac"):  # those look for layers when parameters are added
        train(net, optimizer, 2)
        assert not torch.equal(net[0].weight, frozen)


@every_random
def test_draws_differ_from_the_mean_except_in_norm_layers(name: str) -> None:
    net = network()
    optimizer = make(name, net)
    train(net, optimizer, 1)
    mean = weights(net)
    optimizer.zero_grad()
    with optimizer.sampled():
        draw = weights(net)
        F.cross_entropy(net(data()[0]), data()[1]).backward()
    for key in ("0.weight", "0.bias", "4.weight", "6.bias"):
        assert not torch.equal(mean[key], draw[key])
    for key in ("1.weight", "1.bias"):
        assert torch.equal(mean[key], draw[key])
    for key in ("0.weight", "1.weight", "6.bias"):
        assert torch.equal(weights(net)[key], mean[key])
    optimizer.step()
    # Deterministic, but trained.
    assert not torch.equal(weights(net)["1.weight"], mean["1.weight"])
    std = optimizer.posterior().std()
    assert "1.weight" not in std
    assert all((std[k] > 0).all() for k in ("0.weight", "6.bias"))


@every
def test_accumulated_micro_batches_are_one_batch(name: str) -> None:
    nets = network().eval(), network().eval()  # batch norm would see other batches
    x, y = data()
    optimizers = [make(name, net) for net in nets]
    for _ in range(3):
        optimizers[0].step(closure_of(nets[0], optimizers[0], x, y))

        def pieces() -> None:
            optimizers[1].zero_grad()
            for start, stop in ((0, 20), (20, 48)):
                loss = F.cross_entropy(nets[1](x[start:stop]), y[start:stop])
                (loss * (stop - start) / 48).backward()

        with optimizers[1].sampled():
            pieces()
        optimizers[1].step()
    for left, right in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@every
@pytest.mark.parametrize("clip", ["no", "inside the block", "after it"])
def test_grad_scaler(name: str, clip: str) -> None:
    """Scaled gradients and, where there are any, squares of them, unscaled by the scaler's step or before."""
    nets = network().double().eval(), network().double().eval()
    x, y = data()
    x = x.double()
    plain, scaled = (make(name, net) for net in nets)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        for net, optimizer in ((nets[0], plain), (nets[1], scaled)):
            with optimizer.sampled():
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                if optimizer is plain:
                    loss.backward()
                else:
                    scaler.scale(loss).backward()
                    if clip == "inside the block":
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if optimizer is scaled and clip == "after it":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if optimizer is plain and clip != "no":
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        plain.step()
        scaler.step(scaled)
        scaler.update()
    for left, right in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


@every
def test_grad_scaler_skips_overflow(name: str) -> None:
    net = network()
    optimizer = make(name, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(net, optimizer, 1)
    before = {k: p.detach().clone() for k, p in net.named_parameters()}
    with optimizer.sampled():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(net(data()[0]), data()[1])).backward()
        net[6].bias.grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    for key, p in net.named_parameters():
        assert torch.equal(p, before[key])


@every
def test_bfloat16_autocast_and_mixed_dtypes(name: str) -> None:
    net = network()
    optimizer = make(name, net)
    x, y = data()

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        assert torch.isfinite(optimizer.step(closure))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3).double()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.second(self.first(inputs).double())

    mixed = Mixed()
    optimizer = make(name, mixed)
    for _ in range(2):
        optimizer.step(closure_of(mixed, optimizer, torch.randn(8, 4), torch.arange(8) % 3))
    assert optimizer.state[mixed.second.weight]["momentum"].dtype == torch.float64


@every
def test_channels_last_weights(name: str) -> None:
    nets = network(), network().to(memory_format=torch.channels_last)
    for net in nets:
        train(net, make(name, net), 3)
    assert nets[1][0].weight.is_contiguous(memory_format=torch.channels_last)
    if name in RANDOM:
        return  # the noise falls on the entries in another order
    for left, right in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


@every_random
def test_misuse_is_named(name: str) -> None:
    net = network()
    optimizer = make(name, net)
    x, y = data()
    with pytest.raises(RuntimeError, match="no gradients of a draw"):
        optimizer.step()
    train(net, optimizer, 1)
    with optimizer.sampled():
        with pytest.raises(RuntimeError, match="already open"), optimizer.sampled():
            pass
        with pytest.raises(RuntimeError, match="take the draw for the mean"):
            optimizer.posterior()
        late = F.cross_entropy(net(x), y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


@every_random
def test_a_look_at_a_draw_is_not_a_step(name: str) -> None:
    nets = network(), network()
    optimizers = [make(name, net) for net in nets]
    x, y = data()
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, 2)
    state = optimizers[0].generator.get_state()
    nets[0].eval()
    with optimizers[0].sampled(), torch.no_grad():
        nets[0](x)
    nets[0].train()
    optimizers[0].generator.set_state(state)
    for net, optimizer in zip(nets, optimizers, strict=True):
        with optimizer.sampled():
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert_equal(weights(nets[0]), weights(nets[1]))


BAD = [
    ({"train_size": 0}, "train_size is 0"),
    ({"train_size": 2.5}, "train_size is 2.5"),
    ({"prior": -1.0}, "prior is -1"),
    ({"lr": -1.0}, "lr is -1"),
    ({"betas": (1.5, 0.1)}, r"betas\[0\] is 1.5"),
]


@every
@pytest.mark.parametrize(("options", "match"), BAD)
def test_bad_numbers(name: str, options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ALL[name](network(), **{"train_size": N, **options})


@every
def test_bad_arguments(name: str) -> None:
    net = network()
    with pytest.raises(TypeError, match="train_size"):
        ALL[name](net)
    with pytest.raises(TypeError, match="takes the model first"):
        ALL[name](net.parameters(), train_size=N)
    with pytest.raises(ValueError, match="no trainable weights"):
        ALL[name](network().requires_grad_(False), train_size=N)
    with pytest.raises(TypeError, match="need a Gaussian prior"):
        ALL[name](net, train_size=N, prior=ScaleMixturePrior())
    if name in RANDOM:
        with pytest.raises(ValueError, match="mc_samples is 0"):
            ALL[name](net, train_size=N, mc_samples=0)
        with pytest.raises(ValueError, match="temperature is 0"):
            ALL[name](net, train_size=N, temperature=0.0)
    small = ALL[name](net, train_size=8)
    before = {k: p.detach().clone() for k, p in net.named_parameters()}
    with pytest.raises(ValueError, match="train_size is 8 but a batch has 16 examples"):
        train(net, small, 1)
    for key, p in net.named_parameters():
        assert torch.equal(p, before[key])


@every
def test_a_sum_is_not_a_mean(name: str) -> None:
    net = network()
    optimizer = make(name, net)
    x, y = data()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y, reduction="sum")
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="sum over the 48 examples"):
        optimizer.step(closure)
    with pytest.raises(ValueError, match="sum over the 48 examples"), optimizer.sampled():
        closure()


@pytest.mark.parametrize("name", ["vogn", "ivon"])
def test_a_posterior_becomes_the_next_prior(name: str) -> None:
    net = network()
    optimizer = make(name, net, 0.1)
    train(net, optimizer, 20)
    first = optimizer.posterior()
    assert isinstance(first, Gaussian)
    # Nothing new to learn: with no data to speak of, the second posterior stays at the first.
    second = ALL[name](net, 0.01, train_size=N, prior=GaussianPrior.from_posterior(first))
    x, _ = data()
    for _ in range(30):
        with second.sampled():
            second.zero_grad()
            (0.0 * net(x)).mean().backward()
        second.step()
    for key, value in first.mean().items():
        if key in first.std():
            drift = (second.posterior().mean()[key] - value).abs() / first.std()[key]
            assert drift.max() < 1e-3, key


def test_no_draw_and_no_global_randomness_in_deterministic_ones() -> None:
    for name in ("ogn", "kfac"):
        net = network()
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        optimizer: WeightOptimizer = make(name, net)
        before = weights(net)
        with optimizer.sampled():
            assert_equal(weights(net), before)
        assert torch.equal(torch.rand(2), expected)
        assert isinstance(optimizer.posterior(), Posterior)


def test_a_weight_of_a_penalty_alone_does_not_change_the_others_curvature() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))  # before the layer, and no use on data
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    torch.manual_seed(0)
    model, x, y = Penalised(), torch.randn(8, 3), torch.randint(2, (8,))
    squares = torch.zeros(2, 3)
    for i in range(8):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        squares += torch.autograd.grad(loss, model.layer.weight)[0] ** 2 / 8
    optimizer = OGN(model, 0.1, train_size=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + model.scale.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(optimizer.state[model.layer.weight]["precision"], squares)
