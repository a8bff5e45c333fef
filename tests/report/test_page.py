"""The page: numbers, safety, structure, and unusual comparisons."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score, roc_curve

from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.report import write_report
from torchbayes.report.columns import COLUMNS
from torchbayes.report.fragment import glossary

from .folders import CLASSES, write_folder
from .parsing import Page

HOSTILE = "<script>alert(1)</script>"
THREE: dict[str, dict[str, Any]] = {
    "map": {"skill": 2.0, "draws": 1},
    "dropout": {"skill": 2.5},
    "ensemble": {"skill": 3.0, "members": 3},
}


def three() -> dict[str, dict[str, Any]]:
    return {name: dict(arguments) for name, arguments in THREE.items()}


def page_of(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    check_structure(page)
    return page


def check_structure(page: Page) -> None:
    """Check what holds for every page, whatever its content."""
    assert page.doctype == "doctype html"
    assert page.all("html")[0].attributes["lang"] == "en"
    assert page.all("title")[0].text
    assert len(page.all("h1")) == 1
    assert page.all("main")
    nodes = list(page.root.walk())
    ids = [node.attributes["id"] for node in nodes if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in nodes:
        target = node.attributes.get("href", "")
        if target.startswith("#"):
            assert target[1:] in ids, target
        for name in node.attributes.get("aria-labelledby", "").split():
            assert name in ids, name
    for svg in page.all("svg"):
        named = svg.attributes.get("role") == "img" and svg.attributes.get("aria-label", "").strip()
        assert named or svg.attributes.get("aria-hidden") == "true"
    for image in page.all("img"):
        assert image.attributes["alt"].strip()
    for table in page.all("table"):
        assert table.all("caption")[0].text
        assert all(header.attributes.get("scope") for header in table.all("th"))
    for node in page.all("div", role="region"):
        assert node.attributes["aria-label"]
        assert node.attributes["tabindex"] == "0"
    check_self_contained(page)


def check_self_contained(page: Page) -> None:
    """Check that the page loads nothing and runs only its own script, whose digest is in the policy."""
    loading = ("src", "href", "srcset", "action", "data", "poster", "formaction", "background")
    for node in page.root.walk():
        assert not any(name.startswith("on") for name in node.attributes)
        assert "style" not in node.attributes
        for name in loading:
            value = node.attributes.get(name)
            assert value is None or value.startswith(
                ("#", "data:image/png;base64,", "data:image/svg+xml;base64,", "data:,")
            )
    assert {node.tag for node in page.root.walk()}.isdisjoint({"iframe", "object", "embed", "base"})
    css = "".join(piece for node in page.all("style") for piece in node.pieces if piece)
    assert "url(" not in css
    assert "@import" not in css
    (script,) = page.all("script")
    code = "".join(piece for piece in script.pieces if isinstance(piece, str))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = page.all("meta", http_equiv="Content-Security-Policy")[0].attributes["content"]
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "http" not in policy


def sections(page: Page) -> list[str]:
    return [node.attributes["id"] for node in page.all("section")]


def truth(predictions: Predictions) -> dict[str, float]:
    """Compute the scores with scikit-learn and NumPy."""
    assert predictions.ood_probs is not None
    probs, targets = predictions.probs.double().numpy(), predictions.targets.numpy()
    foreign = predictions.ood_probs.double().numpy()
    probs, foreign = (p / p.sum(1, keepdims=True) for p in (probs, foreign))
    right, sure = probs.argmax(1) == targets, probs.max(1)
    share, confidence = calibration_curve(right, sure, n_bins=15)
    counts = np.histogram(sure, np.linspace(0, 1, 16))[0]

    def entropy(p: np.ndarray) -> np.ndarray:
        return -(p * np.log(p)).sum(1)

    labels = np.r_[np.zeros(len(probs)), np.ones(len(foreign))]
    doubt = np.r_[entropy(probs), entropy(foreign)]
    information = np.r_[
        entropy(probs) - predictions.aleatoric.numpy(),
        entropy(foreign) - predictions.ood_aleatoric.numpy(),  # type: ignore[union-attr]
    ]
    fpr, tpr, _ = roc_curve(labels, doubt, drop_intermediate=False)
    return {
        "accuracy": accuracy_score(targets, probs.argmax(1)),
        "nll": log_loss(targets, probs),
        "ece": float((np.abs(share - confidence) * counts[counts > 0]).sum() / len(sure)),
        "brier": float(((probs - np.eye(CLASSES)[targets]) ** 2).sum(1).mean()),
        "auroc_misclassification": roc_auc_score(~right, -sure),
        "auroc_ood": roc_auc_score(labels, doubt),
        "auroc_ood_mutual_information": roc_auc_score(labels, np.maximum(information, 0)),
        "fpr95_ood": float(fpr[tpr >= 0.95][0]),
    }


def test_numbers_are_those_of_scikit_learn(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, {"dropout": {"skill": 2.5}, "ensemble": {"skill": 3.0}}))
    for method in ("dropout", "ensemble"):
        saved = Predictions.load(tmp_path / "runs" / f"{method}-0" / "predictions.npz")
        for key, value in truth(saved).items():
            assert page.score(method, key) == pytest.approx(value, rel=1e-5), (method, key)


def test_shown_digits_are_the_rounded_value(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, three()))
    cell = page.all("data", data_method="map", data_score="nll")[0]
    assert cell.text == f"{float(cell.attributes['value']):.4f}"
    cell = page.all("data", data_method="map", data_score="accuracy")[0]
    assert cell.text == f"{100 * float(cell.attributes['value']):.2f} %"


def test_means_and_spreads_over_seeds(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, three(), seeds=(0, 1, 2)))
    values = [
        truth(Predictions.load(tmp_path / "runs" / f"dropout-{seed}" / "predictions.npz"))["nll"]
        for seed in (0, 1, 2)
    ]
    cell = page.all("data", data_method="dropout", data_score="nll")[0].parent
    assert cell is not None
    assert page.score("dropout", "nll") == pytest.approx(np.mean(values), rel=1e-5)
    assert f"± {np.std(values, ddof=1):.4f}" in cell.text


def test_the_best_values_are_marked(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, three()))
    for key, pick in {
        "accuracy": max,
        "nll": min,
        "auroc_ood": max,
        "seconds_per_epoch": min,
    }.items():
        values = {name: page.score(name, key) for name in THREE}
        best = [
            name
            for name in THREE
            if "best"
            in (page.all("data", data_method=name, data_score=key)[0].parent).attributes["class"]  # type: ignore[union-attr]
        ]
        assert best == [name for name in THREE if values[name] == pick(values.values())], key  # type: ignore[type-var]


def test_the_headline_says_what_the_table_shows(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, three()))
    assert page.all("h1")[0].text == "ensemble predicts best on digits"
    lead = page.all("p", class_="lead")[0].text
    assert (
        f"Of the three methods, ensemble has the best NLL: {page.score('ensemble', 'nll'):.3f}"
        in lead
    )
    gaps = {}
    for name in THREE:
        saved = Predictions.load(tmp_path / "runs" / f"{name}-0" / "predictions.npz")
        right = accuracy_score(saved.targets, saved.probs.argmax(1))
        gaps[name] = (float(saved.probs.max(1).values.mean()), right)
    worst = max(gaps, key=lambda name: abs(gaps[name][0] - gaps[name][1]))
    sure, right = gaps[worst]
    assert (
        f"{worst} is under-confident: it is {100 * sure:.1f} % sure on average and right "
        f"{100 * right:.1f} % of the time." in lead
    )


def test_a_lead_within_the_noise_is_not_called_best(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, {"map": {"skill": 2.5}, "mle": {"skill": 2.5}}))
    assert "is narrowly ahead on digits" in page.all("h1")[0].text
    assert "could be luck on a test set of this size" in page.all("p", class_="lead")[0].text


def test_all_sections_of_a_full_comparison(tmp_path: Path) -> None:
    reason = {"vogn": "The loss is not finite at step 3."}
    folder = write_folder(tmp_path, three(), failed=reason, extras=True)
    page = page_of(folder)
    assert sections(page) == [
        "notices", "comparison", "failed", "calibration", "unfamiliar", "shift", "abstaining",
        "afterwards", "examples", "draws", "training", "settings", "glossary",
    ]  # fmt: skip
    entry = page.all("dl", class_="failed")[0]
    assert [node.text for node in entry.all("dt")] == ["vogn"]
    assert [node.text for node in entry.all("dd")] == ["The loss is not finite at step 3."]
    names = [svg.attributes.get("aria-label", "") for svg in page.all("svg")]
    for name in THREE:
        for start in (
            f"Reliability diagram of {name} with 15 bins of equal width",
            f"Reliability diagram of {name} with 8 bins of equal mass",
            f"Histogram of {name}'s confidence",
            f"Histograms of {name}'s entropy",
        ):
            assert sum(text.startswith(start) for text in names) == 1, start
    # map is a point estimate: it has no mutual information to draw.
    drawn = [text for text in names if "'s mutual information" in text]
    assert [text.split("'s")[0] for text in drawn] == [
        "Histograms of ensemble",
        "Histograms of dropout",
    ]
    # Four cards and ten to pick from in four groups, the picked one, and two kinds of damage thrice.
    assert len(page.all("img")) == 4 * (4 + 10) + 1 + 2 * 3


def test_an_ensemble_s_members_are_laid_over_each_other(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, three(), epochs=6))
    names = [svg.attributes.get("aria-label", "") for svg in page.all("svg")]
    (label,) = [name for name in names if name.startswith("training NLL")]
    assert "over 6 epochs" in label
    final = 2 * np.exp(-0.4 * 6) + 0.1
    assert f"ensemble {final:.3f}" in label


def test_names_with_html_in_them_are_text(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        {f"{HOSTILE}"[1:]: {}, "a'b\"&<i>": {}},
        classes=[HOSTILE, '"><img src=x onerror=alert(1)>', "&amp;", "'"],
        data=f"data{HOSTILE}",
        model="</title><b>",
        ood=HOSTILE,
        notes=[HOSTILE],
        created=HOSTILE,
        torchbayes='"><script>',
        failed={HOSTILE: HOSTILE},
        settings={HOSTILE: HOSTILE, "epochs": 6, "command": "</code></pre>" + HOSTILE},
    )
    page = page_of(folder)
    assert len(page.all("script")) == 1
    assert not page.all("i")
    for place in ("failed", "settings", "examples"):
        assert HOSTILE in page.id(place).text  # type: ignore[union-attr]
    assert any(HOSTILE in image.attributes["alt"] for image in page.all("img"))
    assert "a'b\"&<i>" in [node.text for node in page.all("th", scope="row")]


def test_one_method(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, {"map": {"draws": 1}}))
    assert page.all("h1")[0].text == "map on digits"
    assert not page.all("td", class_="best")
    assert [node.text for node in page.all("dl", class_="facts")[0].all("dt")][:2] == [
        "NLL",
        "Accuracy",
    ]


def test_many_methods_look_different(tmp_path: Path) -> None:
    names = [f"method{number}" for number in range(28)]
    page = page_of(write_folder(tmp_path, {name: {} for name in names}))
    looks = set()
    table = page.id("comparison").all("table")[0]  # type: ignore[union-attr]
    for row in table.all("th", scope="row"):
        line, shape = row.all("path")
        looks.add((line.attributes["class"], shape.attributes["d"]))
    assert len(looks) == 28
    # Without lines, as in the chart of quality against cost, colour and shape differ.
    assert len({(style.split()[1], shape) for style, shape in looks}) == 28


def test_a_regression_is_sorted_and_named_too(tmp_path: Path) -> None:
    losses = {"map": 1.5, "kfac": -0.5, "bbb": 0.25, "sgld": None, "vogn": 0.5}
    rows = {
        name: {"nll": loss, "rmse": 1.0, "seconds": 2.0, "runs": [{"seed": 0, "nll": loss}]}
        for name, loss in losses.items()
    }
    table = {"data": "t.csv", "model": "mlp", "ood": "far away", "methods": rows}
    (tmp_path / "results.json").write_text(json.dumps(table))
    page = page_of(tmp_path)
    order = ["kfac", "bbb", "vogn", "map", "sgld"]
    body = page.id("comparison").all("tbody")[0]  # type: ignore[union-attr]
    assert [row.all("th")[0].text.split()[0].split("point")[0] for row in body.children] == order
    assert page.all("h1")[0].text == "bbb is the best posterior on t.csv"
    lead = page.all("p", class_="lead")[0].text
    assert "kfac, a point estimate, has the best NLL: −0.500" in lead
    assert [line.split("|")[1].strip() for line in (tmp_path / "table.md").read_text().splitlines()] == [
        "method", "---", *order,
    ]  # fmt: skip


def test_point_estimates_alone(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, {"map": {"skill": 3.0}, "mle": {"skill": 1.0}}))
    assert page.all("h1")[0].text == "map predicts best on digits"
    assert "a point estimate like all of them" in page.all("p", class_="lead")[0].text


def test_a_row_says_itself_what_it_is(tmp_path: Path) -> None:
    rows = {
        "last sample": {"nll": 0.1, "posterior": "Point"},
        "map with another name": {"nll": 0.3, "posterior": "Point"},
        "chain": {"nll": 0.2, "posterior": "Samples"},
    }
    table = {"data": "digits", "methods": rows}
    (tmp_path / "results.json").write_text(json.dumps(table))
    assert page_of(tmp_path).all("h1")[0].text == "chain is the best posterior on digits"


def test_every_method_failed(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, {}, images=False, failed={"map": "No."}))
    assert page.all("h1")[0].text == "No method finished on digits"
    assert sections(page) == ["failed", "settings", "glossary"]


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {"ood": False}, "mle": {"ood": False}}, images=False, ood=None)
    for name in ("map", "mle"):
        (tmp_path / "runs" / f"{name}-0" / "metrics.jsonl").unlink()
    missing = {"unfamiliar", "examples", "training", "failed"}
    assert missing.isdisjoint(sections(page_of(tmp_path)))
    for name in ("map", "mle"):
        (tmp_path / "runs" / f"{name}-0" / "predictions.npz").unlink()
    assert sections(page_of(tmp_path)) == ["notices", "comparison", "settings", "glossary"]


def test_undefined_scores_are_dashes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"map": {"skill": 60.0}, "mle": {"skill": 2.0}})
    page = page_of(folder)
    assert page.score("map", "accuracy") == 1
    assert page.score("map", "auroc_misclassification") is None
    assert page.score("mle", "auroc_misclassification") is not None
    row = page.id("comparison").all("tbody")[0].children[0]  # type: ignore[union-attr]
    assert "not defined" in row.text


def test_every_score_undefined(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}, "mle": {}})
    table = json.loads((tmp_path / "results.json").read_text())
    for entry in table["methods"].values():
        for scores in (entry, entry["spread"], *entry["runs"]):
            for key, value in scores.items():
                if isinstance(value, float):
                    scores[key] = None
    (tmp_path / "results.json").write_text(json.dumps(table))
    assert page_of(tmp_path).all("h1")[0].text == "No scores yet on digits"


def test_a_run_of_an_older_version(tmp_path: Path) -> None:
    table = {"methods": {"map": {"accuracy": 0.97, "nll": 0.1}}, "data": "digits"}
    (tmp_path / "results.json").write_text(json.dumps(table))
    page = page_of(tmp_path)
    assert page.score("map", "accuracy") == 0.97


def test_a_tiny_test_set(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}, "mle": {}})
    for name in ("map", "mle"):
        file = tmp_path / "runs" / f"{name}-0" / "predictions.npz"
        saved = Predictions.load(file)
        assert saved.ood_probs is not None
        assert saved.ood_aleatoric is not None
        one = [saved.probs, saved.aleatoric, saved.targets, saved.ood_probs, saved.ood_aleatoric]
        Predictions(*(part[:1] for part in one)).save(file)
    page_of(tmp_path)


def test_the_page_is_the_same_every_time(tmp_path: Path) -> None:
    write_folder(tmp_path, three())
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


def test_the_command_asks_for_the_same(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, three(), seeds=(0, 1), failed={"vogn": "No."}))
    assert page.all("pre")[0].text == (
        "torchbayes compare --data digits --model mlp --methods ensemble,dropout,map,vogn "
        "--epochs 6 --batch-size 64 --samples 8 --seeds 2 --out OUT"
    )


def test_every_column_is_explained(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, three()))
    links = page.id("comparison").all("a")  # type: ignore[union-attr]
    assert len(links) > 15
    for link in links:
        entry = page.id(link.attributes["href"].removeprefix("#"))
        assert entry is not None
        assert entry.all("dd")[0].text == link.attributes["title"]


def test_every_score_has_an_entry_in_the_glossary() -> None:
    keys = [key for key in glossary()["scores"] if key != "auroc_ood_numbers"]  # of a regression
    assert keys == [column.key for column in COLUMNS]
    assert all(text.endswith(".") for entries in glossary().values() for text in entries.values())


def test_damaged_predictions_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, three())
    (tmp_path / "runs" / "dropout-0" / "predictions.npz").write_bytes(b"")
    page = page_of(tmp_path)
    assert "dropout's predictions are not shown" in page.id("notices").text  # type: ignore[union-attr]
    assert re.search(r"Reliability diagram of map", str([s.attributes for s in page.all("svg")]))
