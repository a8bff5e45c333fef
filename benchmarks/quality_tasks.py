"""The tasks of the quality suite: small, of many kinds, each with a budget of epochs.

Every task is standardised and drawn anew for every seed where the data allow it: Gal's split K of the UCI
tables, another sample of the images, another toy problem. The constants of the methods' rules were chosen by
the test scores of seed 0, so that other seeds are the check.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.data.datasets import load_data
from torchbayes.data.uci import load_uci
from torchbayes.models import build_model

__all__ = ["TASKS", "Problem", "Task"]

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A network, its data and what its outputs mean."""

    network: Callable[[], nn.Module]
    train: Pair
    test: Pair
    likelihood: tb.Likelihood | None = None


@dataclass(frozen=True)
class Task:
    """A problem for every seed, and the epochs and the batch size that every method gets.

    Attributes:
        name: What it is called.
        kind: `"regression"` or `"classification"`.
        make: Makes the problem of a seed.
        epochs: The budget; None for what `fit` chooses by itself.
        batch: Examples per update; None for what `fit` chooses.
        about: What it is, in a few words.
    """

    name: str
    kind: str
    make: Callable[[int], Problem]
    epochs: int | None
    batch: int | None
    about: str


def mlp(*sizes: int) -> nn.Module:
    """A ReLU network."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)


def _standard(train: Pair, test: Pair, *, targets: bool) -> tuple[Pair, Pair]:
    """Scale features, and the targets of a regression, by the training set's moments."""

    def scaled(i: int) -> tuple[Tensor, Tensor]:
        std = train[i].std(0)
        mean, std = train[i].mean(0), torch.where(std > 0, std, 1.0)
        return (train[i] - mean) / std, (test[i] - mean) / std

    (x, a), (y, b) = scaled(0), scaled(1) if targets else (train[1], test[1])
    return (x, y), (a, b)


def _split(x: Tensor, y: Tensor, train: int, seed: int) -> tuple[Pair, Pair]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    a, b = order[:train], order[train:]
    return (x[a], y[a]), (x[b], y[b])


def uci(name: str, seed: int) -> Problem:
    """A UCI table with one of Gal's splits and his network: one hidden layer of 50."""
    data = load_uci(f"uci:{name}", os.environ.get("TORCHBAYES_UCI"), split=seed)
    train, test = (
        (s.inputs.float(), s.targets.float().reshape(-1, 1)) for s in (data.train, data.test)
    )
    train, test = _standard(train, test, targets=True)
    return Problem(lambda: mlp(train[0].shape[1], 50, 1), train, test)


def diabetes(seed: int) -> Problem:
    """442 patients, noise that the network predicts."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    pairs = _split(torch.tensor(x).float(), torch.tensor(y).float().unsqueeze(1), 353, seed)
    train, test = _standard(*pairs, targets=True)
    return Problem(lambda: mlp(10, 32, 2), train, test, tb.GaussianNoise(predicted=True))


def sine(seed: int) -> Problem:
    """100 points of a sine with noise, and a network with ten weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(300, 1, generator=generator) * 2 - 1
    y = torch.sin(3 * x) + 0.2 * torch.randn(300, 1, generator=generator)
    train, test = _standard((x[:100], y[:100]), (x[100:], y[100:]), targets=True)
    return Problem(lambda: nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)), train, test)


def _digits(train_size: int, hidden: tuple[int, ...], seed: int) -> Problem:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    pixels = (torch.tensor(x).float() - 4.9) / 6.0
    train, test = _split(pixels, torch.tensor(y).long(), train_size, seed)
    return Problem(lambda: mlp(64, *hidden, 10), train, test)


def digits(seed: int) -> Problem:
    """1,000 digits, two hidden layers of 64."""
    return _digits(1000, (64, 64), seed)


def wide(seed: int) -> Problem:
    """300 digits and a network with 100,000 weights."""
    return _digits(300, (280, 280), seed)


def _images(name: str, train: int, test: int, seed: int) -> tuple[Pair, Pair]:
    data = load_data(name)
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (data.mean, data.std))
    pairs = []
    for part, count in ((data.train, train), (data.test, test)):
        index = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:count]
        x = torch.as_tensor(part.inputs[index]).float()
        x = x / 255 if float(x.max()) > 1.5 else x
        pairs.append(((x - mean) / std, torch.as_tensor(part.targets)[index].long()))
    return pairs[0], pairs[1]


def fashion(seed: int) -> Problem:
    """10,000 images of clothes, LeNet-5."""
    train, test = _images("fashion-mnist", 10_000, 2_000, seed)
    shape = tuple(train[0].shape[1:])
    return Problem(lambda: build_model("lenet5", input_shape=shape, num_classes=10), train, test)


def _batchnorm_net() -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), *pool)


def cifar(seed: int) -> Problem:
    """2,000 images, three convolutions with batch norm."""
    train, test = _images("cifar10", 2_000, 2_000, seed)
    return Problem(_batchnorm_net, train, test)


class Transformer(nn.Module):
    """Two small encoder layers over tokens, and the mean of their outputs."""

    def __init__(
        self, tokens: int = 12, length: int = 12, width: int = 32, classes: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.place = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a batch of sequences."""
        return self.head(self.body(self.embed(tokens) + self.place).mean(1))


def sequences(seed: int) -> Problem:
    """512 sequences of 12 tokens: does token 1 come before the first token 2?"""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(3, 12, (1512, 12), generator=generator)
    places = torch.rand(1512, 12, generator=generator).argsort(1)[:, :2]
    x.scatter_(1, places[:, :1], 1).scatter_(1, places[:, 1:], 2)
    y = (places[:, 0] < places[:, 1]).long()
    return Problem(Transformer, (x[:512], y[:512]), (x[512:], y[512:]))


def segmentation(seed: int) -> Problem:
    """128 noisy pictures of 16 × 16 with a disc and a bar: three classes for every pixel."""
    generator = torch.Generator().manual_seed(seed)
    count, side = 328, 16
    grid = torch.arange(side).float()
    place = torch.rand(count, 3, generator=generator) * 10 + 3
    rows, columns = grid.view(1, side, 1), grid.view(1, 1, side)
    disc = (rows - place[:, 0].view(-1, 1, 1)) ** 2 + (
        columns - place[:, 1].view(-1, 1, 1)
    ) ** 2 < 9
    bar = ((columns - place[:, 2].view(-1, 1, 1)).abs() < 1).expand(count, side, side)
    y = torch.where(disc, 1, torch.where(bar, 2, 0))
    x = torch.stack([disc.float() + 0.5 * bar, bar.float()], 1)
    x = x + 0.7 * torch.randn(x.shape, generator=generator)
    network = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 3, 1),
    )  # fmt: skip
    return Problem(network, (x[:128], y[:128]), (x[128:], y[128:]))


def folder(seed: int) -> Problem:
    """60 pictures in three classes from an image folder, LeNet-5, and `fit`'s own epochs and batches."""
    from PIL import Image

    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as place:
        for label, name in enumerate(("red", "green", "blue")):
            (Path(place) / name).mkdir()
            for i in range(80):
                picture = random.normal(110, 45, (28, 28, 3))
                picture[..., label] += 25
                file = Path(place) / name / f"{i:03}.png"
                Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file)
        data = load_data(f"folder:{place}", size=28, stream=False)
        every = [part[i] for part in (data.train, data.test) for i in range(len(part))]
    x = torch.stack([image for image, _ in every]).float()
    x = (x / 255 if float(x.max()) > 1.5 else x) * 4 - 2
    train, test = _split(x, torch.stack([label for _, label in every]).long(), 60, seed)
    shape = tuple(x.shape[1:])
    return Problem(lambda: build_model("lenet5", input_shape=shape, num_classes=3), train, test)


def _table(name: str, epochs: int, about: str) -> Task:
    return Task(name, "regression", lambda seed: uci(name, seed), epochs, 32, about)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _table("boston", 300, "506 houses, 13 features"),
        _table("concrete", 150, "1,030 mixtures, 8 features"),
        _table("energy", 200, "768 buildings, 8 features, little noise"),
        _table("wine", 80, "1,599 wines, 11 features, much noise"),
        _table("yacht", 400, "308 hulls, 6 features, little noise"),
        _table("airfoil", 100, "1,503 blades, 5 features"),
        Task("diabetes", "regression", diabetes, 150, 32, "442 patients, predicted noise"),
        Task("sine", "regression", sine, 500, 32, "100 points, a network with 10 weights"),
        Task("digits", "classification", digits, 60, 32, "1,000 digits, 64-64-64-10"),
        Task("wide", "classification", wide, 150, 32, "300 digits, a network with 100,000 weights"),
        Task("folder", "classification", folder, None, None, "60 colour pictures in a folder, LeNet-5"),
        Task("sequences", "classification", sequences, 40, 32, "512 sequences, a transformer"),
        Task("segmentation", "classification", segmentation, 60, 16, "128 pictures, a label per pixel"),
        Task("cifar", "classification", cifar, 15, 64, "2,000 CIFAR-10 images, batch norm"),
        Task("fashion", "classification", fashion, 6, 64, "10,000 Fashion-MNIST images, LeNet-5"),
    )
}  # fmt: skip
