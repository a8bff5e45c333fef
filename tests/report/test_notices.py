"""Each notice appears when its problem is present, and only then."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.report import Results, load_results
from torchbayes.report.extras import Extras
from torchbayes.report.results import RunResult
from torchbayes.report.sections import notices

from .folders import write_folder


def said(rule: notices.Rule, results: Results) -> list[str]:
    return [str(notice.text.striptags()) for notice in rule(results)]


def results_of(folder: Path, methods: dict[str, dict[str, Any]], **changes: Any) -> Results:
    """Return results with scores only, without files of runs."""
    table = {"data": "digits", "methods": methods, **changes}
    (folder / "results.json").write_text(json.dumps(table), encoding="utf-8")
    return load_results(folder)


def test_underfitting_is_more_than_two_points_behind_map(tmp_path: Path) -> None:
    methods = {"map": 0.98, "good": 0.961, "bad": 0.95, "worse": 0.9}
    results = results_of(tmp_path, {name: {"accuracy": value} for name, value in methods.items()})
    assert said(notices.underfitting, results) == [
        "worse (by 8.0 percentage points) and bad (by 3.0 percentage points) are less accurate than map: "
        "underfitting. Train longer, or reduce the noise or the weight of the prior."
    ]
    without = results_of(tmp_path, {"good": {"accuracy": 0.9}, "bad": {"accuracy": 0.5}})
    assert said(notices.underfitting, without) == []


@pytest.mark.parametrize("word", ["over-confident", "under-confident"])
def test_miscalibration_has_a_direction(tmp_path: Path, word: str) -> None:
    # Every answer has confidence 0.7; one in ten is right, or nine in ten are.
    probs = torch.tensor([[0.7, 0.3]]).repeat(100, 1)
    wrong = 90 if word == "over-confident" else 10
    targets = (torch.arange(100) < wrong).long()
    write_folder(tmp_path, {"map": {}})
    file = tmp_path / "runs" / "map-0" / "predictions.npz"
    made = Predictions(probs, torch.zeros(100), targets)
    made.save(file)
    table = json.loads((tmp_path / "results.json").read_text())
    table["methods"]["map"]["ece"] = made.scores()["ece"]
    (tmp_path / "results.json").write_text(json.dumps(table))
    (text,) = said(notices.miscalibrated, load_results(tmp_path))
    gap = abs(0.7 - (100 - wrong) / 100)
    assert text.startswith(f"map (ECE {gap:.3f}) is {word}: ")


def test_good_calibration_is_not_mentioned(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"map": {"ece": 0.05}, "mle": {"ece": None}})
    assert said(notices.miscalibrated, results) == []


def test_many_methods_are_summed_up(tmp_path: Path) -> None:
    results = results_of(tmp_path, {f"m{i}": {"ece": 0.1 + i / 100} for i in range(9)})
    (text,) = said(notices.miscalibrated, results)
    assert text.startswith("m8 (ECE 0.180), m7 (ECE 0.170)")
    assert "and four others are badly calibrated" in text


def test_overfitting_is_a_held_out_loss_that_rises_again(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}, "mle": {}}, epochs=4)
    rows = [{"epoch": i + 1, "validation_nll": v} for i, v in enumerate([1.0, 0.4, 0.5, 0.6])]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "runs" / "map-0" / "metrics.jsonl").write_text(text)
    assert said(notices.overfitting, load_results(tmp_path)) == [
        "The NLL on held-out data rose again for map (0.400 after epoch 2, 0.600 at the end): "
        "overfitting. Train for fewer epochs or use a stronger prior."
    ]


def test_an_ensemble_s_next_member_is_not_overfitting(tmp_path: Path) -> None:
    write_folder(tmp_path, {"ensemble": {"members": 3}}, epochs=5)
    assert said(notices.overfitting, load_results(tmp_path)) == []


def test_surer_about_the_unfamiliar(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"map": {"auroc_ood": 0.49}, "mle": {"auroc_ood": 0.5}})
    assert said(notices.blind_to_the_unfamiliar, results) == [
        "map (AUROC 0.49) is more certain about unfamiliar inputs than about test inputs: do not rely on "
        "entropy here."
    ]


def test_point_estimates_are_a_note_and_collapsed_draws_a_warning(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {"draws": 1}, "bbb": {}, "ensemble": {}})
    file = tmp_path / "runs" / "bbb-0" / "predictions.npz"
    made = Predictions.load(file)
    entropy = torch.special.entr(made.probs).sum(1)
    Predictions(made.probs, entropy - 1e-4, made.targets, draws=8).save(file)
    found = list(notices.no_disagreement(load_results(tmp_path)))
    assert [(n.serious, str(n.text.striptags()).split(":")[0]) for n in found] == [
        (True, "bbb’s 8 draws agree almost everywhere"),
        (False, "map is a point estimate"),
    ]


def test_seeds(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}, "mle": {}})
    (text,) = said(notices.few_seeds, load_results(tmp_path))
    assert text.startswith("Every method ran with one seed")
    write_folder(tmp_path, {"map": {}, "mle": {}}, seeds=(0, 1))
    assert said(notices.few_seeds, load_results(tmp_path)) == []
    table = json.loads((tmp_path / "results.json").read_text())
    table["methods"]["mle"]["runs"].pop()
    (tmp_path / "results.json").write_text(json.dumps(table))
    assert said(notices.few_seeds, load_results(tmp_path)) == [
        "mle finished fewer than the two runs of the others."
    ]


def test_no_mistakes(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {"skill": 60.0}, "mle": {"skill": 1.0}})
    (text,) = said(notices.nothing_to_detect, load_results(tmp_path))
    assert text.startswith("map made no mistake")


def test_the_margin_of_a_small_test_set(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}})
    results = load_results(tmp_path)
    (text,) = said(notices.small_test_set, results)
    share = results.methods[0].scores["accuracy"]
    assert share is not None
    # The usual normal interval is close to Wilson's where the share is far from 0 and 1.
    margin = 196 * (share * (1 - share) / 160) ** 0.5
    assert abs(float(text.split("±")[1].split()[0]) - margin) < 0.3


def test_serious_things_come_first(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {"draws": 1}, "mle": {"skill": 0.0}})
    levels = [notice.serious for notice in notices.notices(load_results(tmp_path))]
    assert levels == sorted(levels, reverse=True)
    assert True in levels
    assert False in levels


def test_what_laplace_linearised(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"laplace": {"nll": 1.0}, "map": {"nll": 1.0}})
    history = ({"epoch": 1, "laplace_precision": 5.5},)
    extras = Extras(options={"subset": "all"})
    run = RunResult(0, {}, history, extras)
    methods = tuple(replace(m, runs=(run,)) if m.name == "laplace" else m for m in results.methods)
    (text,) = said(notices.linearised, replace(results, methods=methods))
    for part in ("kronecker over all weights", "prior precision of 5.5", "draw weights"):
        assert part in text
    assert "(Gauss–Newton)" in text
    extras = Extras(options={"curvature": "empirical"})
    methods = tuple(replace(m, runs=(replace(run, extras=extras),)) for m in methods[:1])
    (text,) = said(notices.linearised, replace(results, methods=methods))
    assert "empirical Fisher" in text
    assert "Gauss–Newton" not in text
    assert said(notices.linearised, results) == []
