"""Curves and calibration go from run folders into the record, and from there into pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from torchbayes.evidence import Record, results_page
from torchbayes.evidence.pictures import calibration_picture, curves_picture, pictures_of
from torchbayes.experiments.record import Bins, record_of
from torchbayes.experiments.saved_predictions import Predictions

RECIPES = ("hwa/mnist-lenet5", "atmc/cifar10-table1")


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


def recorded(out: Path | None, recipe: str = RECIPES[0]) -> Record:
    runs = {
        "hwa": [{"seed": s, "folder": f"runs/hwa-{s}", "accuracy": 0.5} for s in (0, 1)],
        "hwa-single": [{"seed": s, "folder": f"runs/hwa-{s}/last"} for s in (0, 1)],
    }
    results = {
        "created": "2026-01-02T03:04:05+00:00",
        "settings": {"epochs": 3, "seeds": [0, 1]},
        "methods": {name: {"settings": {}, "runs": rows} for name, rows in runs.items()},
    }
    return record_of(recipe, "A title", "cpu", "torchbayes recipes run x", results, out)


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
    assert pictures_of({RECIPES[0]: record}) == {}


def test_saturated_predictions_leave_bins_empty() -> None:
    probs = torch.tensor([[1.0, 0.0]] * 16)
    bins = Bins.of(Predictions(probs, torch.zeros(16), torch.zeros(16, dtype=torch.long)))
    assert sum(bins.count) == 16
    assert bins.count.count(0) == 7


def test_curves_are_means_over_seeds_with_their_deviation(out: Path) -> None:
    record = recorded(out)
    nll, accuracy = curves_picture(record).axes
    (line,) = nll.lines
    assert line.get_xdata().tolist() == [1, 2, 3]
    seeds = np.array(record.curves["hwa"]["validation_nll"])
    assert line.get_ydata() == pytest.approx(seeds.mean(0))
    band = nll.collections[0].get_paths()[0].vertices
    for epoch, values in zip((1, 2, 3), seeds.T, strict=True):
        edges = band[band[:, 0] == epoch, 1]
        assert edges.max() - edges.min() == pytest.approx(2 * values.std(ddof=1))
    assert accuracy.lines[0].get_ydata() == pytest.approx([0.9, 0.95, 0.96667])


def test_calibration_pools_the_seeds_examples() -> None:
    one = Bins((0.5, 0.9), (0.4, 1.0), (10, 30))
    other = Bins((0.7, 0.0), (0.6, 0.0), (30, 0))
    record = replace(recorded(None), calibration={"sgd": (one, other), "sgd-single": (one,)})
    curve, gap = calibration_picture(record).axes
    lines = {line.get_label(): line for line in curve.lines}
    assert lines["sgd"].get_xdata() == pytest.approx([0.65, 0.9])
    assert lines["sgd"].get_ydata() == pytest.approx([0.55, 1.0])
    assert gap.lines[0].get_ydata() == pytest.approx([-0.1, 0.1])
    assert lines["sgd"].get_color() == lines["sgd-single"].get_color()
    assert lines["sgd"].get_linestyle() != lines["sgd-single"].get_linestyle()


def test_a_picture_knows_its_record(out: Path, tmp_path: Path) -> None:
    records = {recipe: recorded(out, recipe) for recipe in RECIPES}
    pictures = [picture for found in pictures_of(records).values() for picture in found]
    assert [p.name for p in pictures] == [
        "hwa-mnist-lenet5-curves.png",
        "atmc-cifar10-table1-calibration.png",
    ]
    page = results_page([], records)
    for picture in pictures:
        assert f"![{picture.alt}](images/results/{picture.name})" in page
        assert not picture.is_in(tmp_path)
        picture.save(tmp_path)
        assert picture.is_in(tmp_path)
        other = replace(picture, record=replace(picture.record, seconds=1.0))
        assert not other.is_in(tmp_path)
