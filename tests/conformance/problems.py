"""Small problems that every registered method must cope with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def blobs(count: int = 240, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three well separated clouds in four dimensions."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % 3
    centres = 3 * torch.eye(3, 4)
    return centres[targets] + torch.randn(count, 4, generator=generator), targets


def images(count: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, 8, 8, generator=generator), torch.arange(count) % 3


def sequences(count: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (count, 5), generator=generator), torch.arange(count) % 3


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


class OddConvolutions(nn.Module):
    """Grouped, dilated, strided, transposed and circularly padded convolutions with three norms."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2, padding_mode="circular")
        self.batch = nn.BatchNorm2d(8)
        self.dilated = nn.Conv2d(8, 8, 3, padding="same", dilation=2, bias=False)
        self.group = nn.GroupNorm(2, 8)
        self.transposed = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1)
        self.activation = nn.PReLU(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batch(self.grouped(x)))
        x = F.relu(self.group(self.dilated(x)))
        return self.head(self.activation(self.transposed(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """An embedding and a two-layer LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        return self.head(outputs[:, -1])


class Attention(nn.Module):
    """An embedding and a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)).mean(1))


class Tied(nn.Module):
    """One weight used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))


class Partial(nn.Module):
    """A frozen layer and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 8).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.frozen(x)))


ODD_MODULES = {
    "convolutions": (OddConvolutions, images),
    "lstm": (Recurrent, sequences),
    "attention": (Attention, sequences),
    "tied": (Tied, blobs),
    "frozen and unused": (Partial, blobs),
}
