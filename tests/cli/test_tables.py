"""Tables by command line alone: train, evaluate, compare, predict, calibrate and the report."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchbayes.experiments.saved_predictions import RegressionPredictions

from ..tables import gal_folder

SMALL = ["--model-set", "hidden=[16]", "--epochs", "2", "--samples", "4"]
HOSTILE = ("[red]alarm[/red]", "<img src=x onerror=alert(1)>", "bell\x07\x1b[31m")


def write(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    """A regression with levels and missing values, its target in thousands."""
    rng = np.random.default_rng(0)
    rows: list[list[Any]] = []
    for i in range(80):
        area, town = rng.normal(90, 20), "ABC"[i % 3]
        price = 3000 * area + 50_000 * (i % 3) + rng.normal(0, 5000)
        rows.append([f"{area:.2f}" if i % 13 else "", town if i % 17 else "NA", round(price)])
    return write(tmp_path / "houses.csv", ["area", "town", "price"], rows)


@pytest.fixture
def alarms(tmp_path: Path) -> Path:
    """A classification whose classes, levels and columns are named by somebody with bad intentions."""
    rng = np.random.default_rng(0)
    rows: list[list[Any]] = []
    for i in range(90):
        kind = i % 3
        rows.append(
            [*(rng.normal(2 * kind, 1, 2).round(3)), f"[b]{kind % 2}\x1b[0m", HOSTILE[kind]]
        )
    return write(tmp_path / "alarms.csv", ["[bold]x", "y\x1b[2J", "<b>z</b>", "class"], rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_regression_from_training_to_predictions(run, houses: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["--data", f"table:{houses}", "--method", "ensemble", *SMALL, "--out", folder]
    code, out, _ = run("train", *arguments, "--target", "price")
    assert code == 0
    assert "Task: regression (the target is a number; --task overrides)" in out
    assert "Missing values in 'area', 'town'" in out
    assert "in the units of 'price'" in out
    code, out, _ = run("evaluate", folder, "--json")
    scores = json.loads(out)
    # Against NumPy: the saved predictions are prices, and the network's own figures differ by the scale.
    saved = RegressionPredictions.load(folder / "regression.npz")
    prices = [float(row["price"]) for row in read(houses)]
    assert set(saved.targets.flatten().round().tolist()) <= set(prices)
    off = saved.means.mean(0).numpy() - saved.targets.numpy()
    assert scores["rmse"] == pytest.approx(math.sqrt(np.mean(off**2)), rel=1e-6)
    scale = json.loads((folder / "table.json").read_text())["std"]
    assert scale == pytest.approx(np.std(prices), rel=0.2)
    assert scores["nll"] == pytest.approx(scores["nll_standardised"] + math.log(scale), rel=1e-6)
    assert scores["rmse"] == pytest.approx(scores["rmse_standardised"] * scale, rel=1e-6)

    # Rows without the target, in another order of columns; the training table is no longer needed.
    rows = [[row["town"], row["area"]] for row in read(houses)[:30]]
    new = write(tmp_path / "new.csv", ["town", "area"], [*rows, ["Z", ""]])
    houses.rename(tmp_path / "gone.csv")
    code, out, _ = run("predict", folder, new, "--out", tmp_path / "out.csv")
    assert code == 0
    assert "column 'town' has levels that the training rows do not have ('Z')" in out
    found = read(tmp_path / "out.csv")
    assert list(found[0]) == ["prediction", "std", "lower90", "upper90", "epistemic", "aleatoric"]
    assert len(found) == 31
    for row in found:
        values = {name: float(value) for name, value in row.items()}
        assert values["lower90"] < values["prediction"] < values["upper90"]
        assert 50_000 < values["prediction"] < 600_000
        total = math.hypot(values["epistemic"], values["aleatoric"])
        assert values["std"] == pytest.approx(total, rel=1e-6)
    code, out, err = run("predict", folder, new, "--json")
    assert code == 0
    assert json.loads(out)[0]["prediction"] == pytest.approx(float(found[0]["prediction"]))
    assert "'Z'" in err
    code, out, _ = run("predict", folder, new)
    assert "11 more rows: --out FILE.csv writes all" in out

    code, _, err = run("evaluate", folder)
    assert (code, "there is no table" in err) == (2, True)


def test_predictions_are_those_of_the_evaluation(run, houses: Path, tmp_path: Path) -> None:
    """The kept encoding gives the test rows the figures that evaluation gave them."""
    folder = tmp_path / "run"
    arguments = ["--data", f"table:{houses}", "--method", "map", *SMALL, "--validation", "0.2"]
    assert run("train", *arguments, "--out", folder)[0] == 0
    assert run("predict", folder, houses, "--out", tmp_path / "p.csv")[0] == 0
    predicted = [float(row["prediction"]) for row in read(tmp_path / "p.csv")]
    prices = [float(row["price"]) for row in read(houses)]
    saved = RegressionPredictions.load(folder / "regression.npz")
    by_price = dict(zip(prices, predicted, strict=True))
    assert len(by_price) == 80
    for price, mean in zip(saved.targets.flatten(), saved.means.mean(0).flatten(), strict=True):
        assert by_price[round(float(price))] == pytest.approx(float(mean), rel=1e-5)


def test_a_classification_with_hostile_names(run, alarms: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["--data", f"table:{alarms}", "--method", "vogn", *SMALL, "--out", folder]
    code, out, _ = run("train", *arguments, "--validation", "0.2")
    assert code == 0
    assert "Task: classification (the target is text" in out
    code, again, _ = run("predict", folder, alarms)
    assert code == 0
    assert "\x1b" not in out + again
    assert "\x07" not in again
    code, out, _ = run("predict", folder, alarms, "--json")
    rows = json.loads(out)
    assert list(rows[0]) == [
        "prediction", "confidence", "entropy", "epistemic", "aleatoric",
        *(f"p_{name}" for name in sorted(HOSTILE)),
    ]  # fmt: skip
    for row in rows:
        chances = {name: row[f"p_{name}"] for name in HOSTILE}
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == max(chances, key=chances.__getitem__)
        assert row["confidence"] == pytest.approx(max(chances.values()))
    shown = {row["prediction"] for row in rows[:20]}
    assert all(name in again for name in shown if "\x1b" not in name and len(name) < 20)
    assert run("calibrate", folder)[0] == 0
    assert run("report", folder)[0] == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "alarms.csv" in page
    assert "<img src=x" not in page
    assert "<b>z</b>" not in page


def test_calibrated_intervals_are_in_the_units_of_the_target(
    run, houses: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = ["--data", f"table:{houses}", "--method", "map", *SMALL, "--out", folder]
    assert run("train", *arguments, "--validation", "0.3")[0] == 0
    code, out, _ = run("calibrate", folder, "--json", "--coverages", "0.8")
    assert code == 0
    own, residual, _ = json.loads(out)["intervals"]
    # One network has one noise level: its interval of 80 % is 2 · 1.2816 standard deviations wide.
    noise = RegressionPredictions.load(folder / "regression.npz").stds.mean()
    assert own["width"] == pytest.approx(2 * 1.28155 * float(noise), rel=1e-3)
    assert residual["width"] > 1000


def test_compare_takes_both_kinds(run, houses: Path, alarms: Path, tmp_path: Path) -> None:
    for table, word in (
        (houses, "Do the intervals hold?"),
        (alarms, "Can you trust the confidence?"),
    ):
        out = tmp_path / table.stem
        code, text, _ = run(
            "compare", "--data", f"table:{table}", "--methods", "map,ensemble", *SMALL, "--out", out
        )
        assert code == 0
        assert "Target: " in text
        page = (out / "report.html").read_text(encoding="utf-8")
        assert f"on {table.name}" in page
        assert word in page
        assert ("quantile (CQR)" in page) == (table == houses)
        assert ("Losses are those of the standardised target" in page) == (table == houses)
        assert "<img src=x" not in page
        assert run("report", out)[0] == 0
        results = json.loads((out / "results.json").read_text())
        assert results["failed"] == {}
        assert results["ood"] == "far rows"
    code, _, err = run("evaluate", out / "runs" / "map-0", "--corruptions")
    assert (code, "leave out --corruptions" in err) == (2, True)


def test_a_table_that_changed_is_neither_scored_nor_resumed(
    run, houses: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = ["--data", f"table:{houses}", *SMALL, "--out", folder]
    assert run("train", *arguments)[0] == 0
    assert run("train", *arguments, "--resume")[0] == 0
    houses.write_text(houses.read_text() + "50,A,200000\n")
    code, _, err = run("evaluate", folder)
    assert (code, "is not the table that the run was trained on" in err) == (2, True)
    code, _, err = run("train", *arguments, "--resume")
    assert code == 2
    assert "holds a run with table_sha256" in err
    comparison = ["compare", "--data", f"table:{houses}", "--methods", "map", *SMALL]
    assert run(*comparison, "--out", tmp_path / "c")[0] == 0
    houses.write_text(houses.read_text() + "51,A,200000\n")
    code, _, err = run(*comparison, "--out", tmp_path / "c", "--resume")
    assert (code, "holds a run with table_sha256" in err) == (2, True)
    (folder / "table.json").unlink()
    code, _, err = run("predict", folder, houses)
    assert (code, "there is no" in err and "table.json" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--target", "prise"], "no column 'prise' (the target): it has 'area', 'town', 'price'"),
        (["--task", "ranking"], "task is 'ranking'"),
        (["--drop", "rooms"], "no column 'rooms'"),
        (["--split", "nowhere.txt"], "there is no file of row numbers nowhere.txt"),
        (["--test-share", "1"], "test_share is 1"),
        (["--model", "lenet5"], "use 'mlp' for other data"),
        (["--setting", "table=3"], "table is 3"),
    ],
)
def test_mistakes_are_one_sentence(
    run, houses: Path, arguments: list[str], match: str, tmp_path: Path
) -> None:
    code, _, err = run(
        "train", "--data", f"table:{houses}", "--epochs", "2", *arguments, "--out", tmp_path / "r"
    )
    assert code == 2
    assert match in err
    assert err.count("\n") == 1


def test_prediction_files_that_do_not_fit(run, houses: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("train", "--data", f"table:{houses}", *SMALL, "--out", folder)[0] == 0
    for header, row, match in (
        (["area"], [80], "lacks the column 'town'"),
        (["area", "town"], ["big", "A"], "has 'big' in column 'area', row 1"),
        (["area", "area", "town"], [1, 2, "A"], "two columns named 'area'"),
        (["80", "A"], [90, "B"], "lacks the columns 'area', 'town'"),
        ([], [], "is empty"),
    ):
        file = write(tmp_path / "new.csv", header, [row])
        code, _, err = run("predict", folder, file)
        assert (code, match in err) == (2, True), err
        assert err.count("\n") == 1
    code, _, err = run("predict", folder, houses, houses)
    assert (code, "give one table" in err) == (2, True)


def test_one_column_without_a_name_is_enough(run, tmp_path: Path) -> None:
    table = tmp_path / "bare.txt"
    table.write_text("".join(f"{i} {2.5 * i}\n" for i in range(30)))
    folder = tmp_path / "run"
    assert run("train", "--data", f"table:{table}", *SMALL, "--out", folder)[0] == 0
    (tmp_path / "new.txt").write_text("3\n4\n")
    code, out, _ = run("predict", folder, tmp_path / "new.txt", "--json")
    assert code == 0
    assert len(json.loads(out)) == 2


def test_uci_with_a_split_for_every_seed(run, tmp_path: Path) -> None:
    folder = gal_folder(tmp_path, 40)
    values = np.loadtxt(folder / "data.txt")
    out = tmp_path / "out"
    code, _, _ = run(
        "compare", "--data", "uci:yacht", "--split", "seed", "--seeds", "2", "--methods", "map",
        *SMALL, "--data-dir", tmp_path, "--out", out,
    )  # fmt: skip
    assert code == 0
    for k in range(2):
        saved = RegressionPredictions.load(out / "runs" / f"map-{k}" / "regression.npz")
        test = np.loadtxt(folder / f"index_test_{k}.txt").astype(int)
        np.testing.assert_allclose(
            saved.targets[:, 0].numpy(), values[test, 1], rtol=1e-5, atol=1e-6
        )
    code, _, err = run("train", "--data", "uci:boston", *SMALL, "--data-dir", tmp_path)
    assert code == 2
    assert "DIR/uci/bostonHousing" in err
