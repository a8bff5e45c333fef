"""Whole networks: squares of per-example gradients against vmap(grad) and, where installed, BackPACK."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from torchbayes import models
from torchbayes.curvature import Capture


class Tagger(nn.Module):
    """Embedding, LSTM in both directions, linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0].mean(1))


class Transformer(nn.Module):
    """A small vision transformer: patches by convolution, class token, positions, two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 17, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


NETWORKS = {
    "lenet5": (models.lenet5, (6, 3, 32, 32)),
    "alexnet": (models.alexnet, (3, 3, 32, 32)),
    "resnet18": (lambda: models.resnet18(stem="cifar"), (2, 3, 16, 16)),
    "resnet18 with the ImageNet stem": (models.resnet18, (2, 3, 32, 32)),
    "resnet20 without norm": (lambda: models.resnet20(batch_norm=False), (3, 3, 16, 16)),
    "resnetpp20": (models.resnetpp20, (2, 3, 16, 16)),
    "resnext block": (lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
    ), (3, 3, 8, 8)),
    "transformer": (Transformer, (3, 3, 16, 16)),
}  # fmt: skip


def loop(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    weights = dict(net.named_parameters())
    total = {name: torch.zeros_like(w) for name, w in weights.items()}
    for i in range(len(x)):
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        for name, g in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            total[name] += g.square() / len(x)
    return total


def vmapped(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    def loss(weights: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (xi.unsqueeze(0),)), yi.unsqueeze(0))

    weights = {name: p.detach() for name, p in net.named_parameters()}
    gradients = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=1)(weights, x, y)
    return {name: g.square().mean(0) for name, g in gradients.items()}


def captured(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    capture = Capture(net, dict(net.named_parameters()))
    with capture.block():
        F.cross_entropy(net(x), y).backward()
    return {name: capture.squares(p) for name, p in net.named_parameters()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name] - value).abs().max() / value.abs().max()
        assert error < 1e-5, f"{name}: relative error {error:.2g}"


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference, vmap
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    net = make().double().eval()
    x, y = torch.randn(shape, dtype=torch.float64), torch.randint(10, shape[:1])
    assert_same(captured(net, x, y), vmapped(net, x, y))


def test_lenet_in_single_precision() -> None:
    torch.manual_seed(0)
    net, x, y = models.lenet5(), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    assert_same(captured(net, x, y), vmapped(net, x, y))


def test_lstm() -> None:
    torch.manual_seed(0)
    net, x, y = Tagger().double(), torch.randint(20, (4, 7)), torch.randint(10, (4,))
    assert_same(captured(net, x, y), loop(net, x, y))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # its own
def test_backpack_agrees() -> None:
    backpack = pytest.importorskip("backpack")
    from backpack.extensions import SumGradSquared

    torch.manual_seed(0)
    layers = [
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10)),
    ]
    net = nn.Sequential(*layers).double()
    x, y = torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.randint(10, (8,))
    got = captured(net, x, y)
    extended, loss = backpack.extend(net), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(SumGradSquared()):
        loss(extended(x), y).backward()
    # Theirs are the squares of a mean's gradients, summed: 1/M² of an example's own, M times.
    assert_same(got, {name: 8 * p.sum_grad_squared for name, p in net.named_parameters()})
