"""`torchbayes export`: the file of a run takes raw inputs and agrees with `torchbayes predict`."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import torchbayes as tb


def test_an_image_run(run, digits: Path, tmp_path: Path) -> None:
    code, text, _ = run("export", digits, "--json")
    assert code == 0
    said = json.loads(text)
    assert said["file"] == str(digits / "model.onnx")
    assert max(said["differences"].values()) < 1e-5
    assert said["checked_on"] == "64 examples of the test split of digits"
    assert said["about"]["classes"] == list("0123456789")
    assert said["about"]["calibration"]["included"] is True

    pixels = (255 * tb.load_data("digits").test.inputs[:3]).byte()
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for file, image in zip(files, pixels[:, 0], strict=True):
        Image.fromarray(image.numpy()).save(file)
    rows = json.loads(run("predict", digits, *files, "--json")[1])
    session = onnxruntime.InferenceSession(said["file"])
    given = session.run(None, {"inputs": pixels.numpy().astype(np.float32) / 255})
    outputs = dict(zip(said["outputs"], given, strict=True))
    for number, row in enumerate(rows):
        assert outputs["probabilities"][number].max() == pytest.approx(row["confidence"], abs=1e-5)
        assert outputs["epistemic"][number] == pytest.approx(row["epistemic"], abs=1e-5)


def test_a_table_without_its_file_is_exported_in_its_own_units(
    run,
    cars: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(cars, tmp_path / "alone")
    config = tmp_path / "alone" / "config.toml"
    text = config.read_text(encoding="utf-8").replace("cars.csv", "gone.csv")
    config.write_text(
        "".join(text.splitlines(keepends=True)[:-1]).replace("torchbayes =", "made =")
    )
    out = tmp_path / "cars.pt2"
    code, text, error = run("export", tmp_path / "alone", "--out", out, "--json")
    assert code == 0, error
    said = json.loads(text)
    assert "random inputs" in said["checked_on"]
    columns = said["about"]["input"]["columns"]
    names = [column["name"] for column in columns]
    assert names[:2] == ["weight", "power"]

    rows = [{"weight": 1500.0, "power": 90.0, "origin": "US", "doors": 5.0}]
    rows.append({"weight": 2000.0, "power": 150.0, "origin": "EU", "doors": None})
    with (tmp_path / "new.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    wanted = json.loads(run("predict", cars, tmp_path / "new.csv", "--json")[1])

    def value(row: dict, column: dict) -> float:
        name = column["name"]
        if name in row:
            return column["if_missing"] if row[name] is None else row[name]
        if name.endswith(" is missing"):
            return float(row[name.removesuffix(" is missing")] is None)
        of, _, level = name.partition(" = ")
        return float(row[of] == level)

    inputs = torch.tensor([[value(r, c) for c in columns] for r in rows], dtype=torch.float64)
    given = torch.export.load(out).module()(inputs)
    for number, row in enumerate(wanted):
        assert float(given["mean"][number]) == pytest.approx(row["prediction"], abs=1e-4)
        assert float(given["std"][number]) == pytest.approx(row["std"], abs=1e-4)


def test_the_mean_and_bad_options(run, digits: Path, tmp_path: Path) -> None:
    code, text, _ = run(
        "export", digits, "--mean", "--out", tmp_path / "mean.pt2", "--raw", "--json"
    )
    assert code == 0
    assert json.loads(text)["draws"] == 1
    assert json.loads(text)["about"]["calibration"]["included"] is False
    code, _, error = run("export", digits, "--mean", "--samples", "3")
    assert (code, error) == (
        2, "torchbayes: --mean is one network, but --samples asks for 3 draws: give one of them\n"
    )  # fmt: skip
    code, _, error = run("export", digits, "--format", "tflite")
    assert (code, error) == (2, "torchbayes: format is 'tflite': expected onnx or pt2\n")
