"""The benchmark scripts, without their clock: a step of every method, and peers that fail."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchbayes.train.registry import METHODS

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = ("timing", "steps", "adapters", "peers", "growth", "laplace_records", "evidence_grid")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a script as Python does when it is run in its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def test_every_method_is_measured_against_its_baseline(load: Any) -> None:
    steps = load("steps")
    assert set(METHODS) <= set(steps.VARIANTS)
    assert {steps.baseline(name) for name in ("sgld", "psgld", "sgnht", "hypernet")} == {"SGD"}
    assert {steps.baseline(name) for name in ("map", "ensemble", "vogn", "bbb flipout")} == {"Adam"}
    assert steps.cycle("kfac") == 10
    assert steps.cycle("vogn") == 1


@pytest.mark.parametrize("kind", sorted({method.posterior_kind for method in METHODS.values()}))
def test_a_posterior_of_every_kind_is_made_and_predicts(load: Any, kind: str) -> None:
    steps = load("steps")
    model, inputs, _ = steps.problem("lenet5", batch=2)
    posterior = steps.posterior_of(kind, model, 2, inputs.shape[1:])
    assert type(posterior).__name__ == kind
    jobs = steps.prediction_jobs(model.eval(), posterior, inputs, 2)
    assert jobs["ours"]().probs.shape == (2, steps.CLASSES)
    jobs["plain"]()


def test_a_peer_that_fails_gives_a_row_with_its_reason(load: Any) -> None:
    peers, entry = load("peers"), load("adapters").Entry

    def broken(net: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        raise RuntimeError("cannot take this network\nand more")

    peers.PEERS = {
        "broken": entry("torch", "bbb", broken),
        "missing": entry("no-such-library", "bbb", broken),
    }
    row = peers.compare("lenet5", "broken", 0.0)
    assert row["error"] == "RuntimeError: cannot take this network"
    assert "no-such-library" in peers.compare("lenet5", "missing", 0.0)["error"]


def test_the_step_around_peers_squares_learns(load: Any) -> None:
    adapters = load("adapters")
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    inputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    peer = adapters.torch_func(net, inputs, targets)
    losses = [float(peer.step()) for _ in range(30)]
    assert losses[-1] < losses[0]


def test_rounds_are_whole_cycles(load: Any) -> None:
    timing = load("timing")
    calls = []
    times = timing.budgeted({"a": lambda: calls.append(0)}, 0.0, least=8, most=40, cycle=10)
    assert len(times["a"]) == 10
    assert len(calls) == 12


def test_the_tables_of_laplace_on_its_page_are_those_of_the_record(load: Any) -> None:
    records = load("laplace_records")
    text = records.PAGE.read_text(encoding="utf-8")
    assert records.page(text, json.loads(records.RECORD.read_text(encoding="utf-8"))) == text


def test_the_evidence_is_measured_at_a_maximum(load: Any) -> None:
    grid = load("evidence_grid")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    noisy = x[:, :1] + x[:, 1:].square() + 0.3 * torch.randn(60, 1, generator=generator)
    targets = {"classify": (noisy[:, 0] > 1).long(), "regress": noisy}
    for how, y in targets.items():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2 if how == "classify" else 1)
        )
        net.double()
        likelihood = getattr(grid, how)(net, x, y, 0.5)
        likelihood.double()

        def log_joint(net: nn.Module = net, y: Tensor = y, likelihood: Any = likelihood) -> Tensor:
            return -60 * likelihood.loss(net(x), y) - 0.25 * sum(
                w.square().sum() for w in net.parameters()
            )

        start = torch.autograd.grad(log_joint(), list(net.parameters()))
        slope = sum(float(g.square().sum()) for g in start) ** 0.5
        # The curvature is at least the prior's 0.5, so that a maximum is at most this many nats above.
        assert slope**2 / (2 * 0.5) < 0.5
