"""The page of a regression: its intervals against SciPy, and axes for losses below 0."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from torchbayes.experiments.saved_predictions import RegressionPredictions
from torchbayes.report import write_report
from torchbayes.report.sections.intervals import coverage

from .parsing import Page


def predictions(noise: float) -> RegressionPredictions:
    """Predictions of N(0, 1) targets with noise of some size, by three draws."""
    rng = np.random.default_rng(0)
    targets = torch.from_numpy(rng.normal(size=(4000, 1)))
    means = torch.from_numpy(rng.normal(0, 0.05, size=(3, 4000, 1)))
    return RegressionPredictions(means, torch.full((3, 4000, 1), noise), targets)


def test_coverage_is_that_of_the_quantiles() -> None:
    """Against intervals between quantiles, which SciPy finds by root finding for single Gaussians."""
    saved = predictions(1.5)
    one = RegressionPredictions(saved.means[:1], saved.stds[:1], saved.targets)
    inside = coverage(one)
    for percent in (0, 10, 50, 90, 99):
        low, high = stats.norm.interval(percent / 100, one.means[0], one.stds[0])
        y = one.targets.numpy()
        assert abs(inside[percent] - np.mean((low <= y) & (y <= high))) < 1e-9
    assert inside[100] == 1


def test_honest_intervals_lie_on_the_diagonal_and_wide_ones_above() -> None:
    """4,000 values: the largest distance is below 0.03 with a probability above 99.9 % (Kolmogorov)."""
    levels = np.linspace(0, 1, 101)
    assert np.abs(coverage(predictions(1.0)) - levels).max() < 0.03
    assert coverage(predictions(2.0))[50] > 0.75


def write(folder: Path, losses: list[float]) -> Path:
    run = folder / "runs" / "map-0"
    run.mkdir(parents=True)
    predictions(2.0).save(run / "regression.npz")
    history = [{"epoch": i, "nll": loss} for i, loss in enumerate(losses)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    scores = {"rmse": 12345.6, "nll": 1.5, "auroc_ood": 0.5, "coverage90": 0.99, "width90": 6.6}
    row = {**scores, "runs": [{"seed": 0, "folder": "runs/map-0", **scores}]}
    table = {"data": "t.csv", "model": "mlp", "settings": {"epochs": 3}, "methods": {"map": row}}
    (folder / "results.json").write_text(json.dumps(table))
    return write_report(folder)


def test_the_page_of_a_regression(tmp_path: Path) -> None:
    text = write(tmp_path, [3.0, 0.5, -2.0]).read_text(encoding="utf-8")
    said = Page(text).root.text
    assert "Do the intervals hold?" in said
    assert "whose intervals are too wide" in said
    assert "AUROC spread" in said
    assert "AUROC entropy" not in said
    assert "12 346" in said.replace("\u202f", " ")
    assert "regression.npz" in said
    assert "Mutual information" not in said


def test_lines_of_negative_losses_stay_in_their_picture(tmp_path: Path) -> None:
    page = Page(write(tmp_path, [3.0, 0.5, -2.0]).read_text(encoding="utf-8")).root
    (section,) = page.all("section", id="training")
    (svg,) = section.all("svg", role="img")
    (line,) = svg.all("path", class_="line")
    points = line.attributes["d"].removeprefix("M").split("L")
    heights = [float(point.split(",")[1]) for point in points]
    assert len(heights) == 3
    assert heights == sorted(heights)  # the picture's axis points down
    assert 0 <= heights[0] < heights[-1] <= float(svg.attributes["viewbox"].split()[3])
