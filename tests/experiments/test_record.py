"""A record holds what the runs of a recipe measured, survives its file and becomes a table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from torchbayes.experiments.record import Bins, Figure, Record, read_records, record_of
from torchbayes.experiments.record_table import record_table
from torchbayes.experiments.saved_predictions import Predictions

RESULTS = {
    "created": "2026-01-02T03:04:05+00:00",
    "settings": {"epochs": 3, "seeds": [0, 1], "command": "x", "seed": 0},
    "methods": {
        "bbb": {
            "summary": "…",
            "settings": {"options": {"lr": 0.1}},
            "runs": [
                {"seed": 0, "folder": "a", "error": 0.02, "seconds": 30.0, "brier": None},
                {"seed": 1, "folder": "b", "error": 0.04, "seconds": 90.0, "brier": 0.5},
            ],
        }
    },
}


@pytest.fixture
def record() -> Record:
    return record_of("paper/name", "A title", "cpu", "torchbayes recipes run paper/name", RESULTS)


def test_record_has_mean_and_sample_deviation(record: Record) -> None:
    figure = record.rows["bbb"]["error"]
    assert figure.mean == pytest.approx(0.03)
    assert figure.spread == pytest.approx(0.02 / 2**0.5)
    assert record.seconds == 120
    assert record.seeds == (0, 1)
    assert "brier" not in record.rows["bbb"]  # one seed has none
    assert record.settings == {"epochs": 3}
    assert record.own == {"bbb": {"options": {"lr": 0.1}}}


def test_record_survives_the_file(record: Record, tmp_path: Path) -> None:
    file = record.save(tmp_path)
    assert file == tmp_path / "paper" / "name.json"
    assert read_records(tmp_path) == {"paper/name": record}


def test_a_broken_record_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "name.json").write_text("{}")
    with pytest.raises(ValueError, match=r"name\.json is not a record .* torchbayes recipes run"):
        read_records(tmp_path)


def test_figure_of_one_value_has_no_spread() -> None:
    assert Figure.of([0.5]) == Figure(0.5, None, (0.5,))


def test_averages_pruning_and_correlations_have_tables_of_their_own() -> None:
    runs = [
        {"seed": 0, "accuracy": 0.9, "x16_error": 0.1, "x1_error": 0.25, "x1_nll": 0.5}
        | {"pruned_75_error": 0.125, "quadruple_faults": 7.0, "correlation_within": 0.5}
    ]
    methods = {"hypernet": {"runs": runs}, "map": {"runs": [{"seed": 0, "accuracy": 0.8}]}}
    settings = {"epochs": 3, "seeds": [0], "seed": 0}
    results = {"created": "2026-01-02T03:04:05+00:00", "settings": settings, "methods": methods}
    lines = record_table(record_of("a/b", "T", "cpu", "c", results)).splitlines()
    assert "| method | accuracy |" in lines
    assert "| method | 75 % removed |" in lines
    assert "| hypernet | 12.50% |" in lines
    assert lines[lines.index("| method | error | NLL |") + 2 :][:2] == [
        "| hypernet ×1 | 25.00% | 0.5000 |",
        "| hypernet ×16 | 10.00% | – |",
    ]
    assert "| method | wrong in all of four | \\|r\\| within blocks |" in lines
    assert lines.count("| map | 80.00% |") == 1
    assert sum(line.startswith("| map ") for line in lines) == 1


def predictions(seed: int, examples: int = 203) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(examples, 3, generator=generator, dtype=torch.float64).softmax(1)
    targets = torch.randint(3, (examples,), generator=generator)
    return Predictions(probs, torch.zeros(examples), targets)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Run folders of two rows with two seeds; one row has no history of its own."""
    for seed in (0, 1):
        run = tmp_path / "runs" / f"hwa-{seed}"
        (run / "last").mkdir(parents=True)
        predictions(seed).save(run / "predictions.npz")
        predictions(seed + 2).save(run / "last" / "predictions.npz")
        lines = (
            {"epoch": e, "validation_nll": 1 / (e + seed), "validation_accuracy": 1 - 0.1 / e}
            for e in (1, 2, 3)
        )
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def recorded(out: Path | None) -> Record:
    runs = {
        "hwa": [{"seed": s, "folder": f"runs/hwa-{s}", "accuracy": 0.5} for s in (0, 1)],
        "hwa-single": [{"seed": s, "folder": f"runs/hwa-{s}/last"} for s in (0, 1)],
    }
    results = {
        "created": "2026-01-02T03:04:05+00:00",
        "settings": {"epochs": 3, "seeds": [0, 1]},
        "methods": {name: {"settings": {}, "runs": rows} for name, rows in runs.items()},
    }
    return record_of("paper/name", "A title", "cpu", "torchbayes recipes run x", results, out)


def test_curves_and_bins_are_those_of_the_runs(out: Path) -> None:
    record = recorded(out)
    assert record.curves == {
        "hwa": {
            "validation_nll": ((1.0, 0.5, 0.33333), (0.5, 0.33333, 0.25)),
            "validation_accuracy": ((0.9, 0.95, 0.96667),) * 2,
        }
    }
    for row, first in (("hwa", 0), ("hwa-single", 2)):
        for seed, bins in enumerate(record.calibration[row]):
            truth = predictions(first + seed)
            level = truth.probs.numpy().max(1)
            hit = truth.probs.numpy().argmax(1) == truth.targets.numpy()
            parts = np.array_split(np.argsort(level), 8)  # the first 203 mod 8 have one more
            assert bins.count == tuple(len(part) for part in parts)
            assert bins.confidence == pytest.approx([level[p].mean() for p in parts], abs=1e-5)
            assert bins.accuracy == pytest.approx([hit[p].mean() for p in parts], abs=1e-5)


def test_record_with_curves_survives_the_file(out: Path, tmp_path: Path) -> None:
    record = recorded(out)
    assert Record.load(record.save(tmp_path / "results")) == record


def test_a_record_from_before_there_were_curves_loads(tmp_path: Path) -> None:
    record = recorded(None)
    file = record.save(tmp_path)
    table = json.loads(file.read_text())
    del table["curves"], table["calibration"]
    file.write_text(json.dumps(table))
    assert Record.load(file) == record


def test_saturated_predictions_leave_bins_empty() -> None:
    probs = torch.tensor([[1.0, 0.0]] * 16)
    bins = Bins.of(Predictions(probs, torch.zeros(16), torch.zeros(16, dtype=torch.long)))
    assert sum(bins.count) == 16
    assert bins.count.count(0) == 7
