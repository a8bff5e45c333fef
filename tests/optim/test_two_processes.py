"""Two gloo processes with half a batch each equal one with two micro-batches and the same draws."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes import optim
from torchbayes.core import distributed

from ..processes import processes

NAMES = ("VOGN", "IVON", "NoisyKFAC")
# The batch of 12 is shared unevenly, and one layer is used by the first process only.
SHARES = (slice(0, 5), slice(5, 12))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(27, 3)
        self.extra = nn.Linear(27, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        h = self.conv(x).tanh().flatten(1)
        return self.head(h) + (self.extra(h) if rank == 0 else 0.0)


def network() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 1, 5, 5, dtype=torch.float64, generator=generator)
    return x, torch.arange(12) % 3


def one_process(name: str) -> dict[str, Tensor]:
    net, (x, y) = network(), batch()
    generators = [torch.Generator().manual_seed(10 + rank) for rank in range(2)]
    optimizer = getattr(optim, name)(net, 0.05, train_size=40, generator=generators[0])
    for _ in range(4):
        optimizer.zero_grad()
        for rank, share in enumerate(SHARES):
            optimizer.generator = generators[rank]
            with optimizer.sampled():
                loss = F.cross_entropy(net(x[share], rank), y[share])
                (loss * (len(y[share]) / 12)).backward()
        optimizer.step()
    return {key: p.detach().clone() for key, p in net.named_parameters()}


def one_of_two(name: str, rank: int) -> dict[str, Tensor]:
    net, (x, y) = network(), batch()
    generator = torch.Generator().manual_seed(10 + rank)
    optimizer = getattr(optim, name)(net, 0.05, train_size=40, generator=generator)
    share = SHARES[rank]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[share], rank), y[share])
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    return {key: p.detach().clone() for key, p in net.named_parameters()}


def refused(name: str, **options: object) -> str:
    """What is said to a module that DistributedDataParallel calls."""
    net = nn.Linear(3, 2)
    optimizer = getattr(optim, name)(net, 0.05, train_size=40, **options)
    wrapped = nn.parallel.DistributedDataParallel(net)
    try:
        with optimizer.sampled() if hasattr(optimizer, "sampled") else nullcontext():
            wrapped(torch.randn(4, 3)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def save_one_of_two(folder: Path) -> None:
    with distributed.process_group():
        rank = distributed.rank()
        shared = {"generator": torch.Generator().manual_seed(0)}
        messages = {name: refused(name) for name in ("VOGN", "IVON", "SGLD", "MAP", "OGN")}
        messages["seeded SGLD"] = refused("SGLD", **shared)
        (folder / f"{rank}.json").write_text(json.dumps(messages))
        torch.save({name: one_of_two(name, rank) for name in NAMES}, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("two")
    done = processes(2, save_one_of_two, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def of_two(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_are_two_micro_batches(
    name: str, of_two: list[dict[str, dict[str, Tensor]]]
) -> None:
    alone = one_process(name)
    for key, value in alone.items():
        assert torch.equal(of_two[0][name][key], of_two[1][name][key]), key
        torch.testing.assert_close(of_two[0][name][key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rank", [0, 1])
def test_averaged_gradients_of_different_weights_are_refused(rank: int, folder: Path) -> None:
    messages = json.loads((folder / f"{rank}.json").read_text())
    for name in ("VOGN", "IVON", "SGLD"):
        assert "DistributedDataParallel averages the gradients of Linear" in messages[name]
    for name in ("MAP", "OGN", "seeded SGLD"):  # the weights are the same in all processes
        assert messages[name] == ""
