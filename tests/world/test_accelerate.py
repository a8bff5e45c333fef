"""accelerate: prepared optimisers draw, accumulate, resume, and share the work of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from torchbayes.integrations import Collector

from ..processes import processes

accelerate = pytest.importorskip("accelerate")

from torchbayes.integrations.accelerate import prepare  # noqa: E402

N = 48
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def assert_equal(one: tb.Posterior, two: tb.Posterior, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    pairs = [(one.mean(), two.mean())]
    if hasattr(one, "std"):
        pairs.append((one.std(), two.std()))
    for left, right in pairs:
        assert left.keys() == right.keys()
        for key, value in left.items():
            torch.testing.assert_close(value, right[key], **tolerance)


@pytest.mark.parametrize("pieces", [2, 4])
def test_the_documented_loop_accumulates(pieces: int) -> None:
    """Without noise, against the whole batch by hand."""
    model = network()
    optimizer = tb.OGN(model, 0.01, train_size=N)
    for x, y in zip(X.split(16), Y.split(16), strict=True):
        optimizer.zero_grad()
        with optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    own = network()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=pieces)
    loader = DataLoader(TensorDataset(X, Y), 16 // pieces)
    made, stepper, loader = prepare(accelerator, own, tb.OGN(own, 0.01, train_size=N), loader)
    for x, y in loader:
        with accelerator.accumulate(made), stepper.sampled():
            accelerator.backward(F.cross_entropy(made(x), y))
        stepper.step()
        stepper.zero_grad()
    assert_equal(stepper.posterior(), optimizer.posterior(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["ivon", "sgld", "swag"])
def test_a_saved_state_resumes_bit_equal(method: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any, Collector]:
        model = network()
        source: Any
        if method == "ivon":
            source = optimizer = tb.IVON(model, train_size=N, generator=seeded())
        elif method == "sgld":
            source = optimizer = tb.SGLD(model, 1e-3, train_size=N, generator=seeded())
        else:
            optimizer, source = torch.optim.SGD(model.parameters(), 0.1), tb.SWAG(model, rank=2)
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = prepare(accelerator, model, optimizer)
        collector = Collector(source, updates=12, burn_in=0.2)
        accelerator.register_for_checkpointing(collector)
        return accelerator, model, optimizer, collector

    def train(parts: tuple[Any, Any, Any, Collector], updates: range) -> None:
        accelerator, model, optimizer, collector = parts
        for update in updates:
            rows = slice(16 * (update % 3), 16 * (update % 3) + 16)
            optimizer.zero_grad()
            if method == "ivon":
                with optimizer.sampled():
                    accelerator.backward(F.cross_entropy(model(X[rows]), Y[rows]))
            else:
                accelerator.backward(F.cross_entropy(model(X[rows]), Y[rows]))
            optimizer.step()
            collector.after_update(epoch_ended=update % 3 == 2)

    whole = start()
    train(whole, range(7))
    whole[0].save_state(str(tmp_path))
    train(whole, range(7, 12))
    resumed = start()
    resumed[0].load_state(str(tmp_path))
    train(resumed, range(7, 12))
    one, two = whole[3].posterior(), resumed[3].posterior()
    assert_equal(one, two)
    if isinstance(one, tb.Samples):
        assert len(one) == len(two) == 10


def test_other_objects_are_prepared_as_ever() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader = prepare(accelerator, DataLoader(TensorDataset(X, Y), 16))
    assert len(loader) == 3
    model = network()
    stepper = prepare(accelerator, torch.optim.SGD(model.parameters(), 0.1))
    assert not hasattr(stepper, "posterior")
    _, stepper = prepare(accelerator, model, tb.MAP(model, train_size=N))
    assert isinstance(stepper.posterior(), tb.Point)


def shared(folder: Path) -> None:
    model = network()
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    loader = DataLoader(TensorDataset(X, Y), 8)
    model, optimizer, loader = prepare(
        accelerator, model, tb.OGN(model, 0.01, train_size=N), loader
    )
    assert not isinstance(model, nn.parallel.DistributedDataParallel)
    for x, y in loader:
        with optimizer.sampled():
            accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.posterior().save(folder / f"{accelerator.process_index}.safetensors")


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Each takes every other batch of 8; by hand, both are in one batch."""
    ended = processes(2, shared, tmp_path)
    assert ended.returncode == 0, ended.stderr
    one, two = (tb.load(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert_equal(one, two)
    model = network()
    optimizer = tb.OGN(model, 0.01, train_size=N)
    for x, y in zip(X.split(16), Y.split(16), strict=True):
        optimizer.zero_grad()
        with optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_equal(one, optimizer.posterior(), rtol=1e-9, atol=1e-12)
