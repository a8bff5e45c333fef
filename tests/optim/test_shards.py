"""Two gloo processes with a model that `fully_shard` has shared out equal one with the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes import optim
from torchbayes.core import distributed

from ..processes import processes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STEPS, SAVED = 4, 2
# Rows that two processes cannot share evenly, and a bias of one entry, of which one of them has nothing.
WIDTH = 121
# Of 18,000 weights in float32 the compiled loops take the updates, of a float64 model torch.
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "IVON": ("IVON", {}, torch.float32),
    "IVON with a rate, 2 draws": (
        "IVON",
        {"lr": 0.05, "mc_samples": 2, "prior": tb.GaussianPrior(precision=2.0, by_fan_in=True)},
        torch.float64,
    ),
    "IVON in pieces": ("IVON", {"lr": 0.05}, torch.float64),
    "SGLD": ("SGLD", {"lr": 1e-4}, torch.float32),
    "SGLD in float64": ("SGLD", {"lr": 1e-4, "prior": tb.ScaleMixturePrior()}, torch.float64),
    "PSGLD": ("PSGLD", {"lr": 1e-4}, torch.float64),
    "SGHMC": ("SGHMC", {"lr": 1e-2}, torch.float32),
    "SGNHT": ("SGNHT", {"lr": 1e-2}, torch.float32),
    "SGNHT, one thermostat": ("SGNHT", {"lr": 1e-2, "per_parameter": False}, torch.float64),
    "ATMC": ("ATMC", {"lr": 1e-2}, torch.float32),
    "ATMC in float64": ("ATMC", {"lr": 1e-2}, torch.float64),
}


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, 1),
    )  # fmt: skip
    return net.to(dtype)


def sharded(net: nn.Sequential, *, mesh: Any = None) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def made(case: str, net: nn.Module) -> torch.optim.Optimizer:
    name, options, _ = CASES[case]
    optimizer: torch.optim.Optimizer = getattr(optim, name)(
        net, train_size=200, generator=torch.Generator().manual_seed(7), **options
    )
    return optimizer


def batch(dtype: torch.dtype, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(8, 6, dtype=dtype, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def train(
    case: str, net: nn.Module, optimizer: Any, steps: range, rows: slice = slice(None)
) -> None:
    for step in steps:
        x, y = (t[rows] for t in batch(CASES[case][2], step))
        if step == 1:
            with torch.no_grad():
                net(x)  # a look at the mean must not be what the next draw is taken for
        optimizer.zero_grad()
        if "pieces" in case:
            for _ in range(2):  # two draws, whose gradients are added
                with optimizer.sampled():
                    (F.mse_loss(net(x), y) / 2).backward()
            optimizer.step()
            continue

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)


def result(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    posterior = optimizer.posterior() if hasattr(optimizer, "posterior") else None
    found = {"mean": tb.snapshot(net), "std": {} if posterior is None else posterior.std()}
    if hasattr(optimizer, "vitals"):
        found["vitals"] = optimizer.vitals()
    return found


def alone(case: str) -> dict[str, Any]:
    net = network(CASES[case][2])
    optimizer = made(case, net)
    train(case, net, optimizer, range(STEPS))
    return result(net, optimizer)


def checkpoint(net: nn.Module, optimizer: Any, folder: Path, *, load: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, state = get_state_dict(net, optimizer)
    together = {"model": model, "optimizer": state}
    if load:
        dcp.load(together, checkpoint_id=folder, no_dist=not distributed.in_group())
        set_state_dict(
            net, optimizer, model_state_dict=model, optim_state_dict=together["optimizer"]
        )
    else:
        dcp.save(together, checkpoint_id=folder, no_dist=not distributed.in_group())


def sentence(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError, FloatingPointError) as error:
        return str(error)
    return ""


def shared_out(folder: Path) -> None:
    """What each of some processes does."""
    with distributed.process_group():
        rank, world = distributed.rank(), distributed.world_size()
        rows = slice(rank * 8 // world, (rank + 1) * 8 // world)
        found: dict[str, Any] = {}
        for case in CASES:
            net = sharded(network(CASES[case][2]))
            optimizer = made(case, net)
            train(case, net, optimizer, range(SAVED), rows)
            if case in RESUMED:
                checkpoint(net, optimizer, folder / case, load=False)
            train(case, net, optimizer, range(SAVED, STEPS), rows)
            found[case] = result(net, optimizer)
        for case in RESUMED:  # what one process has saved
            net = sharded(network(CASES[case][2]))
            torch.manual_seed(rank)
            optimizer = made(case, net)
            checkpoint(net, optimizer, folder / f"{case} alone", load=True)
            train(case, net, optimizer, range(SAVED, STEPS), rows)
            found[f"{case} resumed"] = result(net, optimizer)
        net = sharded(network(torch.float64))
        found["averaged"] = averaged(net, rows)
        state = torch.load(folder / "swag alone.pt", weights_only=True)
        found["averaged resumed"] = averaged(sharded(network(torch.float64)), rows, state)
        said = {
            "prediction": sentence(
                lambda: tb.predictive(net, tb.Point(tb.snapshot(net)), torch.zeros(2, 6))
            ),
            "bank": sentence(lambda: tb.Samples(net, folder=folder / "bank")),
            "tuned": sentence(lambda: optim.SGLD(net, train_size=9)),
            "fit": sentence(
                lambda: tb.fit(net, (torch.zeros(9, 6), torch.zeros(9, 1)), "ivon", in_place=True)
            ),
            "wrapper": sentence(lambda: tb.MeanField(net)),
            "laplace": sentence(lambda: tb.Laplace(net, (torch.zeros(9, 6), torch.zeros(9, 1)))),
            "seeds": sentence(
                lambda: optim.SGLD(
                    net, 0.1, train_size=9, generator=torch.Generator().manual_seed(rank)
                )
            ),
        }
        for name in ("VOGN", "OGN", "KFAC", "NoisyKFAC", "MAP"):
            said[name] = sentence(lambda: getattr(optim, name)(net, train_size=9))  # noqa: B023
        net[7].bias.grad = None
        optimizer = optim.SGLD(net, 1e-4, train_size=9)
        net(torch.full((4, 6), torch.nan if rank else 0.0, dtype=torch.float64)).sum().backward()
        said["not finite"] = sentence(lambda: optimizer.step())
        found["said"] = said
        torch.save(found, folder / f"{rank}.pt")


def averaged(
    net: nn.Module, rows: slice = slice(None), resumed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Of a chain that SWAG and a bank watch; with a state of SWAG its last step goes on from that."""
    optimizer = optim.SGLD(net, 1e-4, train_size=200, generator=torch.Generator().manual_seed(3))
    swag, bank = tb.SWAG(net, rank=2), tb.Samples(net)
    for step in range(3):
        if step == 2:
            kept = swag.state_dict()
            swag = tb.SWAG(net, rank=2)
            swag.load_state_dict(kept if resumed is None else resumed)
        train("SGLD in float64", net, optimizer, range(step, step + 1), rows)
        swag.update()
        bank.append()
    q = swag.posterior()
    return {"mean": q.mean(), "std": q.std(), "bank": bank[2], "kept": kept}


RESUMED = ("IVON", "SGLD", "SGHMC", "SGNHT", "SGNHT, one thermostat", "ATMC")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("shards")
    for case in RESUMED:
        net = network(CASES[case][2])
        optimizer = made(case, net)
        train(case, net, optimizer, range(SAVED))
        checkpoint(net, optimizer, folder / f"{case} alone", load=False)
    torch.save(averaged(network(torch.float64))["kept"], folder / "swag alone.pt")
    done = processes(2, shared_out, folder)
    assert done.returncode == 0, done.stderr
    return folder


def close(case: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    tolerance = (
        {"rtol": 1e-9, "atol": 1e-11}
        if CASES[case][2] == torch.float64
        else {"rtol": 1e-4, "atol": 1e-5}
    )
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one_with_the_whole_model(case: str, folder: Path) -> None:
    expected = alone(case)
    for rank in range(2):
        found = torch.load(folder / f"{rank}.pt", weights_only=True)
        close(case, found[case], expected)


def test_averages_and_banks_hold_whole_weights(folder: Path) -> None:
    expected = averaged(network(torch.float64))
    for rank in range(2):
        found = torch.load(folder / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found["averaged"], expected, rtol=1e-9, atol=1e-11)


def test_an_average_goes_on_with_another_number_of_processes(folder: Path) -> None:
    expected = averaged(network(torch.float64))
    found = torch.load(folder / "0.pt", weights_only=True)
    torch.testing.assert_close(found["averaged resumed"], expected, rtol=1e-9, atol=1e-11)
    alone = averaged(network(torch.float64), resumed=found["averaged"]["kept"])
    torch.testing.assert_close(alone, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_shared_out_says_so(rank: int, folder: Path) -> None:
    said = torch.load(folder / f"{rank}.pt", weights_only=True)["said"]
    assert "is not finite" in said.pop("not finite")  # only one process has seen it
    assert "the generators of the processes differ" in said.pop("seeds")
    assert "give lr" in said.pop("tuned")
    for name, sentence in said.items():
        assert "shard" in sentence, (name, sentence)


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_goes_on_with_another_number_of_processes(case: str, folder: Path) -> None:
    expected = alone(case)
    close(case, torch.load(folder / "0.pt", weights_only=True)[f"{case} resumed"], expected)
    net = network(CASES[case][2])
    optimizer = made(case, net)
    optimizer.generator.manual_seed(1)
    checkpoint(net, optimizer, folder / case, load=True)
    train(case, net, optimizer, range(SAVED, STEPS))
    close(case, result(net, optimizer), expected)


def more_processes(folder: Path) -> None:
    """What each of more than two processes does: go on with what two have saved, or share out in pairs."""
    from torch.distributed.device_mesh import init_device_mesh

    with distributed.process_group():
        rank, found = distributed.rank(), dict[str, Any]()
        if distributed.world_size() == 3:
            for case in ("IVON", "ATMC"):
                net = sharded(network(CASES[case][2]))
                optimizer = made(case, net)
                optimizer.generator.manual_seed(1)  # type: ignore[attr-defined]
                checkpoint(net, optimizer, folder / case, load=True)
                train(case, net, optimizer, range(SAVED, STEPS))
                found[case] = result(net, optimizer)
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("twice", "parts"))
            net = sharded(network(CASES["IVON"][2]), mesh=mesh)
            optimizer = made("IVON", net)
            train("IVON", net, optimizer, range(STEPS), slice(2 * rank, 2 * rank + 2))
            found["IVON"] = result(net, optimizer)
        torch.save(found, folder / f"{rank} of {distributed.world_size()}.pt")


@pytest.mark.parametrize("count", [3, 4])
def test_more_than_two_processes(count: int, folder: Path) -> None:
    """Three go on with a checkpoint of two; four have a model twice, each in two parts."""
    done = processes(count, more_processes, folder)
    assert done.returncode == 0, done.stderr
    for rank in range(count):
        found = torch.load(folder / f"{rank} of {count}.pt", weights_only=True)
        assert found
        for case, ends in found.items():
            close(case, ends, alone(case))
