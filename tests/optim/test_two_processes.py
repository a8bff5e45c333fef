"""Two gloo processes with half a batch each equal one with two micro-batches and the same draws."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes import optim
from torchbayes.core import distributed, reduction
from torchbayes.optim.natural_gradient import WeightOptimizer

from ..processes import processes

NAMES = ("VOGN", "IVON", "NoisyKFAC")
ROADS = ("memory", "messages")  # within one machine, and between machines
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


class Pair(nn.Module):
    """A network whose parts are wrapped and called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Holder(nn.Module):
    """A module with a DDP inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def refused_in_training(
    called: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> str:
    """What is said, if anything, in two steps."""
    try:
        for _ in range(2):
            with optimizer.sampled() if isinstance(optimizer, WeightOptimizer) else nullcontext():
                optimizer.zero_grad()
                called(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def roads_to_ddp(rank: int, early: tuple[nn.Module, torch.optim.Optimizer]) -> dict[str, str]:
    """What is said where DDP is not simply the module that the optimiser was given."""
    wrap, said = nn.parallel.DistributedDataParallel, {}
    net, sampler = early  # made before there was a group
    said["early"] = refused_in_training(wrap(net), sampler)
    for name in ("SGLD", "IVON"):
        make = getattr(optim, name)
        net = Pair()
        first, second = wrap(net.first), wrap(net.second)
        optimizer = make(net, 0.05, train_size=40)
        said[f"parts {name}"] = refused_in_training(lambda x: second(first(x)), optimizer)  # noqa: B023
        holder = Holder(wrap(Pair()))
        said[f"holder {name}"] = refused_in_training(holder, make(holder, 0.05, train_size=40))
        given = wrap(Pair())
        said[f"given {name}"] = refused_in_training(given, make(given, 0.05, train_size=40))
        # The plain module inside is called: nothing is averaged by DDP.
        given = wrap(Pair())
        said[f"plain {name}"] = refused_in_training(given.module, make(given, 0.05, train_size=40))
    for name, seed in (("other seeds", rank), ("one seed", 0)):
        net = Pair()
        generator = torch.Generator().manual_seed(seed)
        sampler = optim.SGLD(net, 0.05, train_size=40, generator=generator)
        said[name] = refused_in_training(wrap(net), sampler)
    # fit takes what is inside.
    x, y = torch.randn(8, 3), torch.zeros(8).long()
    for name, model in (("fit", wrap(Pair())), ("fit function", lambda: wrap(Pair()))):
        run = tb.fit(model, (x, y), "ivon", epochs=1, progress=False)
        said[name] = type(run.model).__name__
    return said


def scaled(rank: int, scale: float, found_inf: float) -> dict[str, str | bool]:
    """What a step does with what a `GradScaler` hands to it."""
    net, (x, y) = network(), batch()
    optimizer = optim.IVON(
        net, 0.05, train_size=40, generator=torch.Generator().manual_seed(10 + rank)
    )
    optimizer.grad_scale = torch.tensor(scale)
    optimizer.found_inf = torch.tensor(found_inf)
    before = net.head.weight.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[SHARES[rank]], rank), y[SHARES[rank]])
        (scale * loss).backward()
        return loss

    try:
        optimizer.step(closure)
    except ValueError as error:
        return {"said": str(error)}
    return {"said": "", "moved": not torch.equal(before, net.head.weight)}


def save_one_of_two(folder: Path) -> None:
    net = Pair()
    early = net, optim.SGLD(net, 0.05, train_size=40)
    with distributed.process_group():
        roads = roads_to_ddp(distributed.rank(), early)
        (folder / f"roads{distributed.rank()}.json").write_text(json.dumps(roads))
        rank = distributed.rank()
        shared = {"generator": torch.Generator().manual_seed(0)}
        messages = {name: refused(name) for name in ("VOGN", "IVON", "SGLD", "MAP", "OGN")}
        messages["seeded SGLD"] = refused("SGLD", **shared)
        (folder / f"{rank}.json").write_text(json.dumps(messages))
        scales = {
            "fine": scaled(rank, 8.0, 0.0),
            "one overflow": scaled(rank, 8.0, float(rank == 1)),
            "other scales": scaled(rank, 8.0 / (1 + rank), 0.0),
        }
        (folder / f"scales{rank}.json").write_text(json.dumps(scales))
        found = {f"memory {name}": one_of_two(name, rank) for name in NAMES}
        reduction.shared_bytes = lambda _: None  # type: ignore[attr-defined]
        found |= {f"messages {name}": one_of_two(name, rank) for name in NAMES}
        os.environ["TORCHBAYES_MESSAGES"] = "bfloat16"
        found |= {f"bfloat16 {name}": one_of_two(name, rank) for name in NAMES}
        torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("two")
    done = processes(2, save_one_of_two, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def of_two(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_are_two_micro_batches(
    name: str, road: str, of_two: list[dict[str, dict[str, Tensor]]]
) -> None:
    alone, (first, second) = one_process(name), (one[f"{road} {name}"] for one in of_two)
    for key, value in alone.items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_messages_in_bfloat16_are_close(
    name: str, of_two: list[dict[str, dict[str, Tensor]]]
) -> None:
    """Sums are rounded to 8 binary digits, 0.4 %, and steps are ratios of them."""
    start = {key: p.detach() for key, p in network().named_parameters()}
    exact, (first, second) = (
        of_two[0][f"messages {name}"],
        (one[f"bfloat16 {name}"] for one in of_two),
    )
    for key, value in exact.items():
        assert torch.equal(first[key], second[key]), key
        moved = (value - start[key]).norm()
        assert (first[key] - value).norm() <= 0.03 * moved, key
        assert key.startswith("idle") or not torch.equal(first[key], value), key


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp_is_found_on_every_road(rank: int, folder: Path) -> None:
    """Around parts of a network, inside it, made later, or with generators that differ."""
    said = json.loads((folder / f"roads{rank}.json").read_text())
    assert said.pop("fit") == said.pop("fit function") == "Pair"
    fine = {name for name in said if name.startswith("plain") or name == "one seed"}
    assert {name for name, message in said.items() if not message} == fine
    for name in said.keys() - fine:
        assert said[name].startswith("DistributedDataParallel averages the gradients of"), name


@pytest.mark.parametrize("rank", [0, 1])
def test_averaged_gradients_of_different_weights_are_refused(rank: int, folder: Path) -> None:
    messages = json.loads((folder / f"{rank}.json").read_text())
    for name in ("VOGN", "IVON", "SGLD"):
        assert "DistributedDataParallel averages the gradients of Linear" in messages[name]
    for name in ("MAP", "OGN", "seeded SGLD"):  # the weights are the same in all processes
        assert messages[name] == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_in_one_process_is_one_in_all(rank: int, folder: Path) -> None:
    found = json.loads((folder / f"scales{rank}.json").read_text())
    assert found["fine"] == {"said": "", "moved": True}
    assert found["one overflow"] == {"said": "", "moved": False}
    assert found["other scales"]["said"].startswith("the processes' loss scales differ (here it is")
