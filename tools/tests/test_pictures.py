"""Curves and calibration go from the records into pictures that know where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tools.records.page import results_pages
from tools.records.pictures import calibration_picture, curves_picture, pictures_of
from torchbayes.experiments.record import Bins, Record, record_of

RECIPES = ("hwa/mnist-lenet5", "atmc/cifar10-table1")
NLL = ((1.0, 0.5, 0.25), (0.5, 0.375, 0.25))
ACCURACY = ((0.9, 0.95, 0.96),) * 2
BINS = Bins((0.5, 0.9), (0.4, 1.0), (10, 30))


def recorded(recipe: str = RECIPES[0]) -> Record:
    """A record of two seeds with curves and calibration."""
    results = {
        "created": "2026-01-02T03:04:05+00:00",
        "settings": {"epochs": 3, "seeds": [0, 1]},
        "methods": {"hwa": {"runs": [{"seed": seed, "accuracy": 0.5} for seed in (0, 1)]}},
    }
    return replace(
        record_of(recipe, "A title", "cpu", "torchbayes recipes run x", results),
        curves={"hwa": {"validation_nll": NLL, "validation_accuracy": ACCURACY}},
        calibration={"hwa": (BINS, BINS)},
    )


def test_curves_are_means_over_seeds_with_their_deviation() -> None:
    record = recorded()
    nll, accuracy = curves_picture(record).axes
    (line,) = nll.lines
    assert line.get_xdata().tolist() == [1, 2, 3]
    seeds = np.array(NLL)
    assert line.get_ydata() == pytest.approx(seeds.mean(0))
    band = nll.collections[0].get_paths()[0].vertices
    for epoch, values in zip((1, 2, 3), seeds.T, strict=True):
        edges = band[band[:, 0] == epoch, 1]
        assert edges.max() - edges.min() == pytest.approx(2 * values.std(ddof=1))
    assert accuracy.lines[0].get_ydata() == pytest.approx(ACCURACY[0])


def test_calibration_pools_the_seeds_examples() -> None:
    other = Bins((0.7, 0.0), (0.6, 0.0), (30, 0))
    record = replace(recorded(), calibration={"sgd": (BINS, other), "sgd-single": (BINS,)})
    curve, gap = calibration_picture(record).axes
    lines = {line.get_label(): line for line in curve.lines}
    assert lines["sgd"].get_xdata() == pytest.approx([0.65, 0.9])
    assert lines["sgd"].get_ydata() == pytest.approx([0.55, 1.0])
    assert gap.lines[0].get_ydata() == pytest.approx([-0.1, 0.1])
    assert lines["sgd"].get_color() == lines["sgd-single"].get_color()
    assert lines["sgd"].get_linestyle() != lines["sgd-single"].get_linestyle()


def test_without_curves_or_calibration_there_is_no_picture() -> None:
    bare = {recipe: replace(recorded(recipe), curves={}, calibration={}) for recipe in RECIPES}
    assert pictures_of(bare) == {}


def test_a_picture_knows_its_record(tmp_path: Path) -> None:
    records = {recipe: recorded(recipe) for recipe in RECIPES}
    pictures = [picture for found in pictures_of(records).values() for picture in found]
    assert [p.name for p in pictures] == [
        "hwa-mnist-lenet5-curves.png",
        "atmc-cifar10-table1-calibration.png",
    ]
    pages = results_pages([], records, {}, {})
    page = pages["results/hwa.md"] + pages["results/atmc.md"]
    for picture in pictures:
        assert f"![{picture.alt}](../images/results/{picture.name})" in page
        assert not picture.is_in(tmp_path)
        picture.save(tmp_path)
        assert picture.is_in(tmp_path)
        other = replace(picture, figures=picture.figures | {"seconds": 1.0})
        assert not other.is_in(tmp_path)
