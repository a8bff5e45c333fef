"""docs/benchmarks.md and the README's table of speed have the figures that were measured, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.records import reasons
from tools.records.benchmarks import FLOOR, benchmarks_page, charts, read_benchmarks, speed_table
from torchbayes.train.registry import METHODS


def figure(ratio: float) -> dict[str, float]:
    return {"ratio": ratio, "low": ratio - 0.05, "high": ratio + 0.05}


PROVENANCE = {
    "threads": 2,
    "commit": "0123456789ab",
    "machine": {"cores": 2, "processor": "a processor"},
    "versions": {"torch": "2.13.0"},
}
PLAIN = (FLOOR, "Adam", "a normal number per weight")


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    """What four files of results hold."""
    rows = {name: figure(1.0) | {"to": "Adam"} for name in PLAIN}
    rows |= {"vogn": figure(1.23) | {"to": "Adam", "target": 1.8, "memory": 1.87}}
    rows |= {name: {"to": "SGD", "error": "MemoryError"} for name in ("sgld", "hypernet")}
    rows |= {"bbb flipout": figure(2.5) | {"to": "Adam", "target": 2.0}}
    kinds = {"Gaussian": figure(0.91), "Generated": {"error": "MemoryError"}}
    predicted = {"draws": 32, "inputs": 1000, "rows": kinds}
    stored = PROVENANCE | {"networks": {"mlp": {"steps": rows, "prediction": predicted}}}
    (tmp_path / "benchmarks.json").write_text(json.dumps(stored))
    known = {"package": "p", "method": "bbb", "version": "0.2.8"}
    peers = {
        "BLiTZ": known | {"peer": figure(3.0), "ours": figure(1.5)},
        "Opacus": known | {"peer": figure(1.0), "ours": figure(2.0)},
        "TyXe": {"method": "bbb", "error": "RuntimeError: no such layer"},
    }
    (tmp_path / "peers.json").write_text(json.dumps(PROVENANCE | {"networks": {"mlp": peers}}))
    points = {"1": figure(1.0), "2": figure(0.6)}
    lines = {name: {"to": "Adam", "points": points} for name in (FLOOR, "bbb")}
    growth = PROVENANCE | {"processes": {"mlp": lines, "lenet5": lines}}
    (tmp_path / "growth.json").write_text(json.dumps(growth))
    served = {"networks": figure(1.0), "Predictor": figure(0.3) | {"target": 1.2}}
    slow = {"one pass": figure(1.0), "predictive": figure(1.4) | {"target": 1.3}}
    parts = {
        "one input": {"lenet5": {"to": "networks", "rows": served, "more_ms": 1.26}},
        "250 inputs": {"resnet18": {"to": "one pass", "rows": slow}},
    }
    sizes = {"network": 90.01, "held": 0.78, "process": 6.8, "file": 0.79}
    kept = {"snapshots": {"resnet50": {"count": 10, "megabytes": sizes}}}
    (tmp_path / "latency.json").write_text(json.dumps(PROVENANCE | {"parts": parts} | kept))
    return read_benchmarks(tmp_path)


def test_answers_have_the_figures_of_the_file(found: dict[str, Any]) -> None:
    rows = benchmarks_page(found).splitlines()
    assert "| one input | 32 networks | LeNet-5 | **0.30 [0.25, 0.35]** ≤ 1.2 | – | – |" in rows
    assert "| 250 inputs | one pass | ResNet-18 | – | 1.40 [1.35, 1.45], target 1.3 | – |" in rows
    assert any("take `Predictor` 1.3 ms more than one pass" in row for row in rows)
    assert any(row.startswith("10 snapshots of ResNet-50 (90 MB) with a frozen") for row in rows)
    assert any("0.78 MB; taking them makes the process 6.8 MB larger" in row for row in rows)


def test_the_page_has_the_figures_of_the_files(found: dict[str, Any], tmp_path: Path) -> None:
    text = benchmarks_page(found)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "| vogn | Adam | **1.23 [1.18, 1.28]** ≤ 1.8 |" in rows
    assert "| vogn | Adam | 1.87 |" in rows
    assert "| sgld | SGD | MemoryError |" in rows
    assert "| bbb flipout | Adam | 2.50 [2.45, 2.55], target 2.0 |" in rows
    missed = "- `bbb flipout` on MLP 784-1200-1200-10: 2.50 [2.45, 2.55], target 2.0: "
    assert f"{missed}{reasons.UNKNOWN}." in text
    assert "| Generated | hypernet | MemoryError |" in rows
    assert any(row.startswith("| BLiTZ 0.2.8 | bbb |") and "**2.00**" in row for row in rows)
    slower = next(row for row in rows if row.startswith("| Opacus"))
    assert "0.50 |" in slower
    assert reasons.UNKNOWN in slower
    assert any("RuntimeError: no such layer" in row for row in rows)
    pictures = charts(found)
    assert [picture.name for picture in pictures] == ["steps.png", "growth_processes.png"]
    for picture in pictures:
        assert f"![{picture.alt}](images/{picture.name})" in text
        picture.save(tmp_path)
        assert picture.is_in(tmp_path)


def test_a_kind_of_posterior_names_the_measured_methods(found: dict[str, Any]) -> None:
    assert "| Gaussian | bbb, vogn | 0.91 [0.86, 0.96] |" in benchmarks_page(found).splitlines()


def test_a_method_that_was_not_measured_has_no_row(found: dict[str, Any]) -> None:
    rows = [line.split(" | ")[0] for line in benchmarks_page(found).splitlines()]
    for method in METHODS:
        # Of those that were measured: a row of times and one of memory.
        assert rows.count(f"| {method}") == (2 if method in ("vogn", "sgld", "hypernet") else 0)


def test_the_readmes_table_is_of_the_files(found: dict[str, Any]) -> None:
    text = speed_table(found)
    assert "| `vogn` | Adam | 1.23 |" in text
    assert "| `sgld` | SGD | – |" in text
    assert "atmc" not in text
    assert "the faster one in 1 of 2 " in text


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(1.0, 2.0, ""), (1.03, 1.0, "OVERLAP"), (2.0, 1.0, "UNKNOWN")],
)
def test_a_slower_row_says_why(ours: float, theirs: float, expected: str) -> None:
    told = reasons.reason("a peer", "mlp", {"peer": figure(theirs), "ours": figure(ours)})
    assert told == (getattr(reasons, expected) if expected else "")


def test_training_at_scale_has_the_figures_of_its_files(tmp_path: Path) -> None:
    ways = {"auto": figure(0.5) | {"target": 0.6, "choosing_in_steps": 2.16}}
    ways["auto, bfloat16"] = figure(0.4)
    pair = {"batch": 128, "processor": {"ratio": 0.8}}
    means = {"K-FAC": 3.9, "Noisy K-FAC": 5.2}
    steps = {name: {"mean": mean, "median": 3.0, "longest": 9.0} for name, mean in means.items()}
    generated = {"HypernetSGD": figure(3.5) | {"target": 4.0, "memory": 3.0, "generators_mb": 50}}
    generated["plain gradient"] = figure(8.0)
    files = {
        "benchmarks": {"networks": {}},
        "throughput": {"networks": {"wrn-16-4": {"batch": 16, "ratios": ways}}},
        "processes": {
            "pairs": {
                "mlp vogn": pair | {"time": figure(0.7), "at_most": 1.0},
                "mlp ivon": pair | {"time": figure(1.1), "at_most": None},
            }
        },
        "kfac": {"cases": {"32 images of 64×64": {"cycles": 2, "steps": steps}}},
        "hypernet": {"networks": {"mlp": {"batch": 128, "rows": generated}}},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(PROVENANCE | content))
    rows = benchmarks_page(read_benchmarks(tmp_path)).splitlines()
    for row in (
        "| WRN-16-4, 16 | **0.50 [0.45, 0.55]** ≤ 0.6 | 0.40 [0.35, 0.45] | 2.2 |",
        "| MLP 784-1200-1200-10 | 128 | `vogn` | **0.70 [0.65, 0.75]** ≤ 1.0 | 0.80 |",
        "| MLP 784-1200-1200-10 | 128 | `ivon` | 1.10 [1.05, 1.15] | 0.80 |",
        "| | 32 images of 64×64 |",
        "| K-FAC | **3.90 [3.00, 9.00]** |",
        "| Noisy K-FAC | 5.20 [3.00, 9.00] |",
        "| MLP 784-1200-1200-10, 128 | **3.50 [3.45, 3.55]** ≤ 4.0 | 8.00 [7.95, 8.05] | 3.0 × 50 MB | – |",
    ):
        assert row in rows
    (tmp_path / "kfac.json").write_text(json.dumps(files["kfac"]))  # without what measured it
    assert "resnet10t" not in benchmarks_page(read_benchmarks(tmp_path))
