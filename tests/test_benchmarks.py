"""The benchmark scripts, without their clock: rows for every method, peers that fail, and the page."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchbayes.train.registry import METHODS

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = ("timing", "steps", "adapters", "peers", "growth", "reasons", "page")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a script as Python does when it is run in its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def figure(ratio: float) -> dict[str, float]:
    return {"ratio": ratio, "low": ratio - 0.05, "high": ratio + 0.05}


PROVENANCE = {
    "threads": 2,
    "commit": "0123456789ab",
    "machine": {"cores": 2, "processor": "a processor"},
    "versions": {"torch": "2.13.0"},
}


def results(folder: Path, steps: ModuleType) -> None:
    rows = {name: figure(1.0) | {"to": "Adam"} for name in steps.BARE}
    rows |= {"vogn": figure(1.23) | {"to": "Adam", "target": 1.8, "memory": 1.87}}
    kinds = {"Gaussian": figure(0.91), "Generated": {"error": "MemoryError"}}
    predicted = {"draws": 32, "inputs": 1000, "rows": kinds}
    stored = PROVENANCE | {"networks": {"mlp": {"steps": rows, "prediction": predicted}}}
    (folder / "benchmarks.json").write_text(json.dumps(stored))
    peers = {
        "BLiTZ": {
            "package": "b",
            "method": "bbb",
            "version": "0.2.8",
            "peer": figure(3.0),
            "ours": figure(1.5),
        },
        "Opacus": {
            "package": "o",
            "method": "vogn",
            "version": "1.6.0",
            "peer": figure(1.0),
            "ours": figure(2.0),
        },
        "TyXe": {"method": "bbb", "error": "RuntimeError: no such layer"},
    }
    (folder / "peers.json").write_text(json.dumps(PROVENANCE | {"networks": {"mlp": peers}}))
    points = {"1": figure(1.0), "2": figure(0.6)}
    lines = {name: {"to": "Adam", "points": points} for name in (steps.BARE[0], "bbb")}
    growth = PROVENANCE | {"processes": {"mlp": lines, "lenet5": lines}}
    (folder / "growth.json").write_text(json.dumps(growth))


def test_page_has_the_figures_of_the_files(load: Any, tmp_path: Path) -> None:
    results(tmp_path, load("steps"))
    load("page").write(tmp_path, tmp_path / "docs")
    text = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for method in METHODS:
        assert sum(row.startswith(f"| {method} |") for row in rows) == 2  # time and memory
    assert "| vogn | Adam | **1.23 [1.18, 1.28]** ≤ 1.8 |" in rows
    assert "| vogn | Adam | 1.87 |" in rows
    assert "| Generated | hypernet | MemoryError |" in rows
    assert any(row.startswith("| BLiTZ 0.2.8 | bbb |") and "**2.00**" in row for row in rows)
    slower = next(row for row in rows if row.startswith("| Opacus"))
    assert "0.50 |" in slower
    assert load("reasons").UNKNOWN in slower
    assert any("RuntimeError: no such layer" in row for row in rows)
    for image in ("steps", "growth_processes"):
        assert f"images/{image}.png" in text
        assert (tmp_path / "docs" / "images" / f"{image}.png").stat().st_size > 0


def test_the_readmes_table_is_of_the_files(load: Any, tmp_path: Path) -> None:
    results(tmp_path, load("steps"))
    text = load("page").speed(tmp_path)
    assert "| `vogn` | Adam | 1.23 |" in text
    assert "| `atmc` | SGD | – |" in text
    assert "the faster one in 1 of 2 " in text


def test_the_readme_is_not_stale(load: Any) -> None:
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert load("page").speed(FOLDER.parent / "results") in readme


def test_every_method_is_measured_and_predicts(load: Any) -> None:
    steps = load("steps")
    assert set(METHODS) <= set(steps.VARIANTS)
    assert set(METHODS) == set(steps.POSTERIORS)
    assert steps.cycle("kfac") == 10
    assert steps.cycle("vogn") == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(1.0, 2.0, ""), (1.03, 1.0, "OVERLAP"), (2.0, 1.0, "UNKNOWN")],
)
def test_a_slower_row_says_why(load: Any, ours: float, theirs: float, expected: str) -> None:
    reasons = load("reasons")
    told = reasons.reason("a peer", "mlp", {"peer": figure(theirs), "ours": figure(ours)})
    assert told == (getattr(reasons, expected) if expected else "")


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
