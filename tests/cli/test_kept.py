"""Runs of the command line, of `fit` and of `Run.save` are one format; `predict` uses the calibration."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import torchbayes as tb
from torchbayes.core.reading import read_json

SMALL = ["--epochs", "8", "--samples", "2", "--model-set", "hidden=[32]"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from typer.testing import CliRunner

    from torchbayes.cli import app

    folder = tmp_path_factory.mktemp("kept") / "run"
    words = ["train", "--data", "digits", "--method", "mle", *SMALL, "--out", str(folder)]
    assert CliRunner().invoke(app, [*words, "--set", "lr=0.02", "--json"]).exit_code == 0
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = tb.load_data("digits").test.inputs[7, 0]
    Image.fromarray((255 * pixels).byte().numpy()).save(tmp_path / "digit.png")
    return tmp_path / "digit.png"


def test_a_run_of_the_command_line_is_loaded_without_model_and_data(
    digits: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    test = tb.load_data("digits").test
    monkeypatch.setattr("torchbayes.experiments.settings.load_data", None)
    run = tb.load_run(digits)
    assert run.preprocessing.classes == tuple("0123456789")
    assert tb.metrics.accuracy(run.predict(test.inputs).probs, test.targets) > 0.85
    file = tmp_path / "digit.png"
    Image.fromarray((255 * test.inputs[3, 0]).byte().numpy()).save(file)
    assert run.predict([file, str(file)]).prediction.tolist() == 2 * [int(test.targets[3])]
    assert len(run.predict(file)) == 1
    run.save(tmp_path / "copy")
    again = tb.load_run(tmp_path / "copy")
    assert torch.equal(again.predict(test.inputs).probs, run.predict(test.inputs).probs)


def test_a_saved_run_is_evaluated_and_predicted(
    run, digits: Path, image: Path, tmp_path: Path
) -> None:
    tb.load_run(digits).save(tmp_path / "copy")
    one, other = (json.loads(run("evaluate", d, "--json")[1]) for d in (digits, tmp_path / "copy"))
    assert one["nll"] == other["nll"]
    one, other = (
        json.loads(run("predict", d, image, "--json")[1]) for d in (digits, tmp_path / "copy")
    )
    assert one == other


def test_predict_uses_the_calibration_and_says_so(
    run, digits: Path, image: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(digits, folder)
    code, out, err = run("predict", folder, image)
    assert "calibration" not in out
    (raw,) = json.loads(run("predict", folder, image, "--json")[1])
    assert run("calibrate", folder, "--coverages", "0.9,0.999", "--risks", "0.2,0.1")[0] == 0
    table = read_json(folder / "calibration.json", "")
    code, out, err = run("predict", folder, image)
    assert code == 0
    assert "sets and risks of calibration.json, probabilities a" in out
    assert "set90" in out
    assert "set99.9" not in out
    code, out, err = run("predict", folder, image, "--json")
    assert "calibration.json" in err
    (row,) = json.loads(out)
    loaded = tb.load_run(folder)
    x = tb.data.read_image(image, (1, 8, 8))[None]
    probs = loaded.predict(x, calibrated=False).probs.double()[0]
    scale = table["temperature"]
    if scale["used"]:  # p^(1/T), normalised
        probs_t = probs ** (1 / scale["value"])
        assert row["confidence"] == pytest.approx(float(probs_t.max() / probs_t.sum()), rel=1e-4)
    threshold = table["conformal"][0]["threshold"]
    assert row["set90"] == [str(i) for i in range(10) if 1 - float(probs[i]) <= threshold]
    answered = [
        r["target"]
        for r in table["abstention"]
        if r["threshold"] is not None and raw["confidence"] > r["threshold"]
    ]
    assert row["risk"] == min(answered, default=None)
    code, out, _ = run("predict", folder, image, "--raw", "--json")
    assert json.loads(out) == [raw]


def test_calibrate_says_what_it_made_worse(
    run, digits: Path, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(digits, folder)
    monkeypatch.setattr(
        "torchbayes.posthoc.calibration.temperature_scaling",
        lambda *_: tb.posthoc.TemperatureScaling(9.0),
    )
    code, out, _ = run("calibrate", folder)
    assert code == 0
    assert "worse: the temperature 9 makes the NLL on the held-out part worse" in " ".join(
        out.split()
    )
    scale = read_json(folder / "calibration.json", "")["temperature"]
    assert scale["after"]["nll"] > scale["before"]["nll"]
    assert f"({scale['before']['nll']:.4f} before, {scale['after']['nll']:.4f} after)" in out
    (raw,) = json.loads(run("predict", folder, image, "--raw", "--json")[1])
    _, out, err = run("predict", folder, image, "--json")
    (row,) = json.loads(out)
    assert "probabilities as they are, because its temperature made them worse" in err
    assert row["confidence"] == raw["confidence"]
    assert "set90" in row


def test_intervals_of_a_table_are_the_corrected_ones(run, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.uniform(0, 1, 300)
    y = 1000 * x + 200 * generator.normal(size=300)
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("x", "y"), *zip(x, y, strict=True)])
    folder = tmp_path / "run"
    assert run("train", "--data", f"table:{tmp_path / 't.csv'}", "--method", "map", *SMALL,
               "--out", folder, "--setting", "noise=fixed", "--setting", "noise_std=0.01",
               )[0] == 0  # fmt: skip
    own = json.loads(run("predict", folder, tmp_path / "t.csv", "--json")[1])
    assert run("calibrate", folder)[0] == 0
    _, out, err = run("predict", folder, tmp_path / "t.csv", "--json")
    rows = json.loads(out)
    assert "the 90 % intervals are corrected as calibration.json says" in err
    (margin,) = (
        np.ravel(r["margin"])[0]
        for r in read_json(folder / "calibration.json", "")["intervals"]
        if r["score"] == "quantile" and r["target"] == 0.9
    )
    for row, before in zip(rows, own, strict=True):
        assert row["prediction"] == before["prediction"]
        assert row["upper90"] == pytest.approx(before["upper90"] + margin, rel=1e-6)
    covered = np.mean([r["lower90"] <= v <= r["upper90"] for r, v in zip(rows, y, strict=True)])
    assert 0.8 < covered < 0.97
    # In Python too, in the units of the table: from its file or encoded rows.
    loaded = tb.load_run(folder)
    expected = [row["prediction"] for row in rows]
    encoded = loaded.preprocessing(tmp_path / "t.csv")
    for inputs in (tmp_path / "t.csv", str(tmp_path / "t.csv"), encoded):
        np.testing.assert_allclose(loaded.predict(inputs).mean[:, 0], expected, rtol=1e-6)


def test_a_run_of_python_is_refused_in_a_sentence(run, tmp_path: Path) -> None:
    x = torch.randn(40, 2)
    tb.fit(torch.nn.Linear(2, 2), (x, (x[:, 0] > 0).long()), "map", epochs=1, folder=tmp_path / "r",
           progress=False)  # fmt: skip
    for command in ("evaluate", "calibrate"):
        code, _, err = run(command, tmp_path / "r")
        assert code == 2
        assert "was trained in Python on data that its config.toml does not name" in err


def test_older_folders_are_still_read(run, digits: Path, image: Path, tmp_path: Path) -> None:
    """A folder of before: no likelihood, no inputs, and settings that did not exist then."""
    from torchbayes.train.run_folder import RunFolder

    folder = tmp_path / "run"
    shutil.copytree(digits, folder)
    (folder / "likelihood.safetensors").unlink()
    (folder / "inputs.json").unlink()
    files = RunFolder(folder)
    config = files.read_config()
    for key in ("build", "reset", "noise", "noise_std", "accumulate", "clip_norm", "torch"):
        config.pop(key, None)
    files.write_config(config)
    one, other = (json.loads(run("predict", d, image, "--json")[1]) for d in (digits, folder))
    assert one == other
    one, other = (json.loads(run("evaluate", d, "--json")[1]) for d in (digits, folder))
    assert one["nll"] == other["nll"]
    # A kill just before the names of the classes were written.
    shutil.copytree(digits, tmp_path / "killed")
    killed = RunFolder(tmp_path / "killed")
    scale = killed.read_preprocessing().normalise
    tb.data.Preprocessing(scale).save(killed.inputs_file, killed.table_file)
    assert json.loads(run("predict", killed.path, image, "--json")[1]) == json.loads(
        run("predict", digits, image, "--json")[1]
    )
    words = ["--data", "digits", "--method", "mle", *SMALL, "--set", "lr=0.02", "--out", folder]
    code, _, err = run("train", *words, "--resume")
    assert code == 0, err


def test_remedies_are_spelled_as_they_are_typed(run, tmp_path: Path) -> None:
    rows = [("name", "y"), *((f"person {i}", i % 7) for i in range(60))]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    code, _, err = run("train", "--data", f"table:{tmp_path / 't.csv'}", "--out", tmp_path / "r")
    assert code == 2
    assert "leave it out with --drop 'name'" in err
    with pytest.raises(tb.data.DataError, match=r"leave it out with drop=\['name'\]"):
        tb.load_data(f"table:{tmp_path / 't.csv'}")
