"""Hypernetworks around any network: what they generate, how latents are shared, files and bad input."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.models import (
    lenet5,
    mlp,
    pyramidnet110_a48,
    resnet18,
    resnet50,
    resnext29_8x64d,
    vgg11,
    wide_resnet,
)
from torchbayes.variational.residual_blocks import find_blocks


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(strategy: str = "all-in-one", latent: object = tb.latents.normal) -> tb.Hypernet:
    torch.manual_seed(0)
    return tb.Hypernet(wide_resnet(10, 1), strategy, latent, 8, 8, generator=seeded(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[str] | None, int]] = {
    "WideResNet": (lambda: wide_resnet(16, 1), None, 6),
    "ResNeXt": (resnext29_8x64d, None, 9),
    "PyramidNet": (pyramidnet110_a48, None, 54),
    "ResNet-18": (lambda: resnet18(stem="cifar"), None, 8),
    "ResNet-50": (resnet50, None, 16),
    "VGG": (vgg11, [f"features.{i}" for i in (4, 8, 11, 15, 18, 22, 25)], 0),
    "LeNet-5": (lenet5, ["conv1", "conv2", "fc1", "fc2"], 0),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_any_network(name: str) -> None:
    make, layers, blocks = NETWORKS[name]
    # On the meta device, as the generators of the large ones would not fit in a test's time.
    with torch.device("meta"):
        model = make()
        net = tb.Hypernet(model, latent_dim=2, hidden_dim=2, layers=layers)
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert len(net.blocks) == blocks
    convolutions = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    if layers is None:
        inside = [
            f"{n}.weight" for n in convolutions if any(n.startswith(f"{b}.") for b in net.blocks)
        ]
        assert sorted(net.generated) == sorted(inside)
        assert len(inside) == len(convolutions) - 1  # all but the stem
    else:
        assert net.generated == [f"{layer}.weight" for layer in layers]
    for name in net.generated:
        weight = model.get_parameter(name)
        assert net.second.get_parameter(name).shape == (2, *weight.shape)


@pytest.mark.parametrize(
    ("make", "lr"), [(lenet5, 0.003), (lambda: wide_resnet(10, 1), 0.03)], ids=["lenet5", "wrn"]
)
def test_trains_and_predicts(make: Callable[[], nn.Module], lr: float) -> None:
    torch.manual_seed(0)
    net = tb.Hypernet(make(), "all-in-one", tb.latents.uniform_positive, 4, 4, generator=seeded(0))
    optimizer = tb.variational.HypernetSGD(net, lr=lr, train_size=100)
    y = torch.arange(16) % 4
    x = torch.randn(4, 3, 32, 32)[y] + 0.1 * torch.randn(
        16, 3, 32, 32
    )  # four patterns, easily told
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    probs = tb.predictive(net, net.posterior(), x, samples=2, recalibrate=False).probs
    torch.testing.assert_close(probs.sum(1), torch.ones(16))


def test_defaults_train_a_network_without_batch_norm() -> None:
    generator = seeded(0)
    patterns = torch.randn(10, 1, 28, 28, generator=generator)
    y = torch.arange(600) % 10
    x = patterns[y] + 0.5 * torch.randn(600, 1, 28, 28, generator=generator)
    run = tb.fit(
        lambda: lenet5(in_channels=1, image_size=28), (x[:500], y[:500]), "hypernet", epochs=8,
        batch_size=25, progress=False,
    )  # fmt: skip
    correct = run.predict(x[500:], samples=8, generator=seeded(1)).prediction == y[500:]
    assert correct.float().mean() > 0.8


def test_steps_without_a_rate_move_the_draw_by_their_length() -> None:
    """At first g/√v is the sign of g, so that W2·a moves by α·√(8/f) in every weight: 0.01/100 of a rise."""
    net = tb.Hypernet(mlp(32, hidden=(18,)), latent_dim=4, hidden_dim=4, generator=seeded(0))
    optimizer = tb.variational.HypernetSGD(
        net, train_size=100, prior=0.0, momentum=0.0, nesterov=False
    )
    optimizer.zero_grad()
    x, y = torch.randn(20, 32, generator=seeded(1)), torch.arange(20) % 10
    F.cross_entropy(net(x), y).backward()
    (name,) = net.generated
    _, activation = net.drawn[name]
    own = dict(net.model.named_parameters())
    gradients = {n: p.grad.clone() for n, p in own.items() if p.grad is not None}
    values = {n: p.detach().clone() for n, p in own.items()}
    first, second = (p.detach().clone() for p in (net._triples()[0][2], net._triples()[0][3]))
    optimizer.step()
    moved = torch.tensordot(activation, net._triples()[0][3] - second, dims=1)
    expected = -1e-4 * 0.5 * gradients[name].sign()  # fan-in 32
    torch.testing.assert_close(moved.detach(), expected, rtol=1e-3, atol=1e-9)
    for other in gradients.keys() - {name}:  # biases have the fan-in of the weights beside them
        share = 0.5 if other.startswith(name.rpartition(".")[0]) else (8 / 18) ** 0.5
        step = (own[other] - values[other]).detach()
        torch.testing.assert_close(
            step, -1e-4 * share * gradients[other].sign(), rtol=1e-2, atol=1e-7
        )
    length = (net._triples()[0][2] - first).abs().max()
    assert float(length.detach()) == pytest.approx(
        1e-4, rel=1e-2
    )  # the latent's 4 inputs: full rate
    assert optimizer.param_groups[0]["lr"] == 0.01  # the given values are back
    assert torch.equal(own[name].grad, gradients[name])  # type: ignore[arg-type]


def test_few_hidden_units_that_are_all_off_at_times() -> None:
    """One of 16 draws has no unit on, of 4: the prior's pull does not grow without bounds."""
    net = tb.Hypernet(
        mlp(4, hidden=(8, 8)), latent=tb.latents.normal, hidden_dim=4, generator=seeded(0)
    )
    optimizer = tb.variational.HypernetSGD(net, train_size=100)
    x, y, off = torch.randn(20, 4, generator=seeded(1)), torch.arange(20) % 10, 0
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        off += sum(not bool(activation.any()) for _, activation in net.drawn.values())
        optimizer.step()
    assert off > 3
    assert all(float(w2.detach().abs().max()) < 1 for w2 in net.second.parameters())


@pytest.mark.parametrize("width", [8, 280])  # the larger layer's units are updated one by one
def test_units_that_are_always_off_keep_their_weights(width: int) -> None:
    net = tb.Hypernet(mlp(4, hidden=(width, width)), hidden_dim=4, generator=seeded(0))
    with torch.no_grad():
        for w1 in net.first.parameters():
            w1.fill_(-1.0)
    optimizer = tb.variational.HypernetSGD(net, train_size=100)
    assert bool(net.units) == (width == 280)
    before = [w2.detach().clone() for w2 in net.second.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randn(20, 4)), torch.arange(20) % 10).backward()
        optimizer.step()
    for w2, old in zip(net.second.parameters(), before, strict=True):
        torch.testing.assert_close(w2.detach(), old, rtol=1e-2, atol=0)


def test_a_group_that_is_added_has_steps_of_bounded_length() -> None:
    net = tb.Hypernet(mlp(4, hidden=(8, 8)), latent_dim=4, hidden_dim=4, generator=seeded(0))
    frozen = net.model.get_parameter("layers.0.bias").requires_grad_(False)
    optimizer = tb.variational.HypernetSGD(net, train_size=100, momentum=0.0)
    optimizer.add_param_group({"params": [frozen.requires_grad_()]})
    before = frozen.detach().clone()
    F.cross_entropy(net(torch.randn(5, 4)), torch.arange(5)).backward()
    optimizer.step()
    assert frozen.grad is not None
    torch.testing.assert_close(
        frozen.detach() - before, -1e-4 * frozen.grad.sign(), rtol=1e-2, atol=1e-7
    )


def test_any_torch_optimiser_trains_it() -> None:
    net = tb.Hypernet(mlp(4, hidden=(8, 8)), latent_dim=4, hidden_dim=4, generator=seeded(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    before = copy.deepcopy(net.state_dict())
    F.cross_entropy(net(torch.randn(5, 4)), torch.arange(5)).backward()
    optimizer.step()
    for name in net.generated:
        for part in ("first", "second"):
            key = f"{part}.{name}"
            assert not torch.equal(net.state_dict()[key], before[key])


def test_strategies_share_latents_as_they_should() -> None:
    blocks = ["layer1.0", "layer2.0", "layer3.0"]
    groups = {s: small(s).groups for s in ("all-in-one", "block-wise", "layer-wise")}
    assert set(groups["all-in-one"].values()) == {"all"}
    assert list(dict.fromkeys(groups["block-wise"].values())) == blocks
    assert all(name.startswith(f"{block}.") for name, block in groups["block-wise"].items())
    assert list(groups["layer-wise"]) == list(groups["layer-wise"].values())
    for strategy in groups:
        net = small(strategy)
        latents = net.latents()
        assert len(latents) == len(set(groups[strategy].values()))
        values = [tuple(z.tolist()) for z in latents.values()]
        assert len(set(values)) == len(values)


def test_one_draw_per_batch_with_hypernet_sgd() -> None:
    net = small()
    optimizer = tb.variational.HypernetSGD(net, lr=0.1, train_size=100)
    x = torch.randn(4, 3, 8, 8)
    optimizer.zero_grad()
    net(x[:2]).sum().backward()
    first = tb.snapshot(net.model)
    net(x[2:]).sum().backward()
    assert all(torch.equal(first[n], net.model.get_parameter(n)) for n in net.generated)
    optimizer.step()
    net(x)
    assert not any(torch.equal(first[n], net.model.get_parameter(n)) for n in net.generated)


def test_step_without_a_draw_is_an_error() -> None:
    net = small()
    optimizer = tb.variational.HypernetSGD(net, lr=0.1, train_size=100)
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="does not belong to a draw"):
        optimizer.step()


def test_hypernet_sgd_resumes() -> None:
    def train(net: tb.Hypernet, optimizer: tb.variational.HypernetSGD, steps: int) -> None:
        generator = seeded(4)
        for _ in range(steps):
            x = torch.randn(4, 3, 8, 8, generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(net(x), torch.arange(4)).backward()
            optimizer.step()

    one = small()
    optimizer = tb.variational.HypernetSGD(one, lr=0.1, train_size=100)
    train(one, optimizer, 2)
    two = small()
    again = tb.variational.HypernetSGD(two, lr=0.1, train_size=100)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(one, optimizer, 2)
    train(two, again, 2)
    for (name, left), (_, right) in zip(
        one.named_parameters(), two.named_parameters(), strict=True
    ):
        assert torch.equal(left, right), name


def test_gradient_scaling_is_undone_before_the_step() -> None:
    nets = [tb.Hypernet(mlp(4, hidden=(8,)), generator=seeded(0)) for _ in range(2)]
    nets[1].load_state_dict(copy.deepcopy(nets[0].state_dict()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(8, 4)
    for net, scaled in zip(nets, (False, True), strict=True):
        net.generator.manual_seed(3)
        optimizer = tb.variational.HypernetSGD(net, lr=0.01, train_size=100)
        loss = F.cross_entropy(net(x), torch.arange(8))
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
    for one, two in zip(nets[0].second.parameters(), nets[1].second.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", list(tb.latents.LATENTS))
def test_latents_have_their_moments(name: str) -> None:
    moments = {  # mean, variance and support
        "normal": (0.0, 1.0, (-math.inf, math.inf)),
        "uniform": (0.0, 1 / 3, (-1.0, 1.0)),
        "uniform-positive": (0.5, 1 / 12, (0.0, 1.0)),
        "half-normal": (math.sqrt(2 / math.pi), 1 - 2 / math.pi, (0.0, math.inf)),
    }
    mean, variance, (low, high) = moments[name]
    count = 100_000
    z = tb.latents.LATENTS[name](count, seeded(0)).double()
    assert z.shape == (count,)
    assert low <= float(z.min())
    assert float(z.max()) <= high
    assert abs(float(z.mean()) - mean) < 5 * math.sqrt(variance / count)
    # The fourth central moment is at most 3 variances squared for all four.
    assert abs(float(z.var()) - variance) < 5 * variance * math.sqrt(2 / count)


def test_mean_is_the_closed_form_for_normal_latents() -> None:
    net = small()
    posterior = net.posterior()
    mean = posterior.mean()
    for name in net.generated:
        first = net.first.get_parameter(name).detach()
        second = net.second.get_parameter(name).detach().movedim(0, -1)
        size = first.norm(dim=1)  # W1·z ~ N(0, ‖row‖²), and E relu of it is ‖row‖ / √(2π)
        exact = second @ (size / math.sqrt(2 * math.pi))
        variance = second.square() @ (size.square() * (0.5 - 1 / (2 * math.pi)))
        # Hidden units are correlated: their errors add up to at most √8 times what they would apart.
        error = (8 * variance / 4096).sqrt()
        assert bool(((mean[name] - exact).abs() < 5 * error).all())


def test_posterior_is_saved_and_loaded(tmp_path: Path) -> None:
    net = small("block-wise", tb.latents.half_normal)
    posterior = net.posterior()
    posterior.save(tmp_path / "p.safetensors")
    loaded = tb.load(tmp_path / "p.safetensors", net.model)
    assert isinstance(loaded, tb.posterior.Generated)
    one, two = posterior.sample(seeded(2)), loaded.sample(seeded(2))
    assert one.keys() == two.keys() == tb.snapshot(net.model).keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert repr(loaded) == repr(posterior)


def test_calibrated_draws_keep_their_statistics(tmp_path: Path) -> None:
    net = small()
    batches = [torch.randn(8, 3, 8, 8, generator=seeded(1)) + 1]
    posterior = net.posterior().calibrated(
        lambda draws: [tb.recalibrate_batchnorm(net.model, d, batches) for d in draws],
        3,
        seeded(2),
    )
    posterior.save(tmp_path / "p.safetensors")
    loaded = tb.load(tmp_path / "p.safetensors", net.model)
    draws, again = list(posterior.draws(10)), list(loaded.draws(10))
    assert len(draws) == len(again) == 3
    for draw, other in zip(draws, again, strict=True):
        expected = tb.recalibrate_batchnorm(net.model, draw, batches)
        for name, tensor in draw.items():
            assert torch.equal(tensor, other[name])
            torch.testing.assert_close(tensor, expected[name])
    assert not torch.equal(draws[0]["bn1.running_mean"], draws[1]["bn1.running_mean"])
    x = batches[0]
    probs = tb.predictive(net, loaded, x, samples=3).probs
    singles = [tb.average.freeze(net, d, keep_statistics=True)(x).softmax(1) for d in draws]
    torch.testing.assert_close(probs, torch.stack(singles).mean(0), rtol=1e-4, atol=1e-6)


def test_entries_are_those_of_the_draws() -> None:
    posterior = small("layer-wise").posterior()
    places = {name: torch.tensor([0, 5]) for name in posterior.generated[:2]}
    one = posterior.entries(places, 1, seeded(7))
    draw = posterior.sample(seeded(7))
    for name, index in places.items():
        torch.testing.assert_close(one[name][0], draw[name].flatten()[index])


def test_own_latents_work_but_are_not_saved(tmp_path: Path) -> None:
    def sparse(size: int, generator: torch.Generator | None) -> Tensor:
        return (torch.rand(size, generator=generator) < 0.5).float()

    net = small(latent=sparse)
    net(torch.randn(2, 3, 8, 8))
    posterior = net.posterior()
    assert set(posterior._latents(seeded(0))["all"].tolist()) <= {0.0, 1.0}
    with pytest.raises(ValueError, match="is a custom function"):
        posterior.save(tmp_path / "p.safetensors")


def test_frozen_draw_has_no_trace_of_the_hypernetwork() -> None:
    net = small()
    plain = tb.average.freeze(net, net.posterior().sample(), [torch.randn(8, 3, 8, 8)])
    assert type(plain) is type(net.model)
    assert plain.state_dict().keys() == net.model.state_dict().keys()


def test_blocks_are_found_or_named() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(F.relu(self.one(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3)
            self.body, self.tail = Residual(), nn.ModuleList([Residual(), nn.Conv2d(4, 4, 1)])
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.tail[1](self.tail[0](self.body(self.stem(x))))
            return self.fc(x.mean((2, 3)))

    model = Net()
    assert find_blocks(model) == ["tail.0"]  # the other one is no element of a list
    net = tb.Hypernet(model, "block-wise", blocks=["body", "tail.0"])
    assert [n.removesuffix(".weight") for n in net.generated] == [
        "body.one", "body.two", "tail.0.one", "tail.0.two",
    ]  # fmt: skip
    assert set(net.groups.values()) == {"body", "tail.0"}
    assert net(torch.zeros(1, 3, 6, 6)).shape == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "block-wise"}, "no residual blocks for strategy 'block-wise'"),
        ({"strategy": "everything"}, "strategy is 'everything': expected all-in-one"),
        ({"layers": ["conv9"]}, "layers has 'conv9', but no weight.*did you mean 'conv"),
        ({"blocks": ["stage"]}, "has no block 'stage'"),
        ({"latent_dim": 0}, "latent_dim is 0: expected at least 1"),
        ({"hidden_dim": -1}, "hidden_dim is -1"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tb.Hypernet(lenet5(), **arguments)


def test_bad_types() -> None:
    with pytest.raises(TypeError, match="latent is 'normal'"):
        tb.Hypernet(lenet5(), latent="normal")
    with pytest.raises(TypeError, match="HypernetSGD is for a Hypernet"):
        tb.variational.HypernetSGD(lenet5(), train_size=100)
    with pytest.raises(ValueError, match="no trainable weights"):
        tb.Hypernet(lenet5().requires_grad_(False))
