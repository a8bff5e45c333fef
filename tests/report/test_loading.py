"""Loading the folder of a comparison: required, missing and damaged files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from torchbayes import METHODS
from torchbayes.core.errors import FileError
from torchbayes.report import load_results, write_report

from .folders import predictions, write_folder


def test_everything_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {"draws": 1}, "ensemble": {"members": 2}}, seeds=(3, 4))
    results = load_results(tmp_path)
    assert (results.data, results.model, results.ood) == ("digits", "mlp", "noise")
    assert [method.name for method in results.methods] == ["map", "ensemble"]
    method = results.methods[1]
    assert (method.index, method.seed, [run.seed for run in method.runs]) == (1, 3, [3, 4])
    assert method.predictions is not None
    assert np.array_equal(method.predictions.probs, predictions(1003).probs)
    assert [len(run.history) for run in method.runs] == [12, 12]
    assert method.runs[0].history[0]["epoch"] == 1
    assert results.images is not None
    assert results.problems == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no .*results.json"),
        ("{", "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1, 2]", "is not the result of a comparison"),
        ('{"data": "digits"}', "is not the result of a comparison"),
        ('{"methods": []}', "is not the result of a comparison"),
        ('{"methods": {"map": 3}}', "the entry of method 'map' is 3"),
    ],
)
def test_bad_results_are_one_sentence(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=reason) as caught:
        load_results(tmp_path)
    assert "\n" not in str(caught.value)


def test_results_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="not text"):
        load_results(tmp_path)


def test_undefined_numbers_are_none(tmp_path: Path) -> None:
    scores = {"nll": None, "ece": math.nan, "brier": math.inf, "accuracy": 1, "mce": True}
    table = {"methods": {"map": scores}}
    (tmp_path / "results.json").write_text(json.dumps(table), encoding="utf-8")
    read = load_results(tmp_path).methods[0].scores
    assert read == {"nll": None, "ece": None, "brier": None, "accuracy": 1.0, "mce": None}


def test_only_results_are_needed(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}}, images=False)
    for file in (tmp_path / "runs" / "map-0").iterdir():
        file.unlink()
    results = load_results(tmp_path)
    assert results.methods[0].predictions is None
    assert results.methods[0].runs[0].history == ()
    assert results.images is None
    assert results.problems == ()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "flipped"])
def test_damaged_predictions_are_a_problem_not_a_failure(tmp_path: Path, damage: str) -> None:
    write_folder(tmp_path, {"map": {}, "mle": {}})
    file = tmp_path / "runs" / "map-0" / "predictions.npz"
    whole = file.read_bytes()
    middle = len(whole) // 3
    file.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "empty": b"",
            "text": b"not an archive",
            "flipped": whole[:middle] + bytes(255 - b for b in whole[middle : middle + 200])
            + whole[middle + 200 :],
        }[damage]
    )  # fmt: skip
    results = load_results(tmp_path)
    assert [method.name for method, _ in results.predicted] == ["mle"]
    assert len(results.problems) == 1
    assert results.problems[0].startswith("map")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("probs", np.full((160, 4), np.nan, np.float32)),
        ("probs", np.full((160, 4), 3.0, np.float32)),
        ("targets", np.full(160, 9)),
        ("targets", np.zeros(7, np.int64)),
        ("aleatoric", np.full(160, np.nan, np.float32)),
        ("aleatoric", np.zeros(3, np.float32)),
        ("ood_probs", np.full((80, 4), np.nan, np.float32)),
    ],
)
def test_unusable_predictions_are_a_problem(tmp_path: Path, name: str, value: np.ndarray) -> None:
    write_folder(tmp_path, {"map": {}})
    file = tmp_path / "runs" / "map-0" / "predictions.npz"
    with np.load(file) as archive:
        arrays = {key: archive[key] for key in archive.files}
    np.savez(file, **{**arrays, name: value})
    results = load_results(tmp_path)
    assert results.methods[0].predictions is None
    assert "does not hold usable predictions" in results.problems[0]


def test_the_next_seed_stands_in_for_damaged_predictions(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}}, seeds=(5, 6))
    (tmp_path / "runs" / "map-5" / "predictions.npz").write_bytes(b"")
    assert load_results(tmp_path).methods[0].seed == 6


def test_a_history_that_a_kill_cut_short(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}})
    file = tmp_path / "runs" / "map-0" / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    assert len(load_results(tmp_path).methods[0].runs[0].history) == 5


@pytest.mark.parametrize("test", [np.zeros((3, 4)), np.zeros((2, 1, 2, 2), dtype="U1"), None])
def test_unusable_images_are_a_problem(tmp_path: Path, test: np.ndarray | None) -> None:
    write_folder(tmp_path, {"map": {}})
    if test is None:
        (tmp_path / "images.npz").write_bytes(b"PK\x03\x04 cut")
    else:
        np.savez(tmp_path / "images.npz", test=test)
    results = load_results(tmp_path)
    assert results.images is None
    assert results.problems[0].startswith("Pictures are not shown")


def test_nothing_in_a_file_is_unpickled(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}})
    file = tmp_path / "runs" / "map-0" / "predictions.npz"
    np.savez(file, probs=np.array([{"a": 1}], dtype=object), draws=1)
    np.savez(tmp_path / "images.npz", test=np.array([{"a": 1}], dtype=object))
    results = load_results(tmp_path)
    assert results.methods[0].predictions is None
    assert results.images is None
    assert len(results.problems) == 2


def test_a_single_run(tmp_path: Path) -> None:
    write_folder(tmp_path, {"bbb": {}}, seeds=(7,))
    run = tmp_path / "runs" / "bbb-7"
    config = {"data": "digits", "model": "mlp", "method": "bbb", "seed": 7, "epochs": 6}
    (run / "config.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in config.items()))
    whole = load_results(tmp_path).methods[0]
    (run / "scores.json").write_text(json.dumps(dict(whole.scores)))
    results = load_results(run)
    (method,) = results.methods
    assert (results.data, results.model, method.name, method.seed) == ("digits", "mlp", "bbb", 7)
    assert method.scores == whole.scores
    assert method.predictions is not None
    assert len(method.runs[0].history) == 6
    assert method.summary == METHODS["bbb"].summary
    assert (results.classes, results.ood) == ((), None)
    about = {"classes": ["setosa", "<b>"], "ood": "far rows", "notes": ["a note"], "methods": 3}
    (run / "about.json").write_text(json.dumps(about))
    results = load_results(run)
    assert (results.classes, results.ood, results.notes) == (
        ("setosa", "<b>"), "far rows", ("a note",),
    )  # fmt: skip
    page = write_report(run).read_text(encoding="utf-8")
    assert "Unfamiliar inputs: far rows" in page
    assert "setosa, &lt;b&gt;" in page
    (run / "config.toml").write_text("=")
    with pytest.raises(ValueError, match="is not a finished run"):
        load_results(run)


@pytest.mark.parametrize("name", ["results.json", "images.npz"])
def test_a_link_out_of_a_comparison_is_not_followed(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "comparison", {"map": {}})
    outside = tmp_path / name
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    if name == "images.npz":
        results = load_results(folder)
        assert results.images is None
        assert any("leads out of" in problem for problem in results.problems)
        return
    with pytest.raises(FileError, match=r"results\.json leads out of .*: put the file itself"):
        load_results(folder)


@pytest.mark.parametrize("name", ["scores.json", "config.toml", "about.json"])
def test_a_link_out_of_a_run_is_not_followed(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    (folder / "config.toml").write_text('method = "map"\n')
    for table in ("scores.json", "about.json"):
        (folder / table).write_text("{}")
    load_results(folder)
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(FileError, match=rf"{name} leads out of .*: put the file itself"):
        load_results(folder)
