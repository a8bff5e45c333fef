"""Names from outside are shown, never obeyed; what cannot be written ends in one sentence and exit code 2."""

from __future__ import annotations

import csv
import json
import logging
import resource
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from torchbayes.cli.output import visible, visible_notices
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.experiments.table_predictions import write_csv
from torchbayes.report import load_results

from ..processes import processes

QUICK = ["--data", "digits", "--model-set", "hidden=[8]", "--epochs", "1", "--samples", "1"]
ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"


def test_what_a_terminal_would_obey_is_shown() -> None:
    shown = visible(f"a{ESCAPES}b é 漢字 ±\nc")
    assert shown.isprintable() or shown.replace("\n", "").isprintable()
    assert shown.startswith("a\\x1b]0;title\\x07")
    assert shown.endswith("b é 漢字 ±\nc")


@pytest.mark.parametrize("name", ["x[/b]y", "[red]"])
def test_markup_in_a_folders_name(run, tmp_path: Path, name: str) -> None:
    code, out, err = run("train", *QUICK, "--out", tmp_path / name)
    assert code == 0, err
    assert name in out.replace("\n", "").replace(" ", "")
    assert (tmp_path / name / "scores.json").exists()


def test_class_names_with_escape_sequences(run, tmp_path: Path) -> None:
    names = ["\x1b[31mred", "[bold]b"]
    for number, name in enumerate(names):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(10):
            pixels = np.full((8, 8), 200 * number + i, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    folder = tmp_path / "run"
    data = ["--data", f"folder:{tmp_path / 'data'}", "--model", "mlp", "--model-set", "hidden=[8]"]
    code, _, err = run("train", *data, "--epochs", "30", "--samples", "1", "--out", folder)
    assert code == 0, err
    images = [tmp_path / "data" / name / "0.png" for name in names]
    code, out, err = run("predict", folder, *images)
    assert code == 0, err
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out
    code, out, _ = run("predict", folder, tmp_path / "\x1b[2Jmissing.png")
    assert code == 2
    assert "\x1b" not in out


def test_log_lines_and_warnings_with_escape_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with visible_notices():
        assert logging.lastResort is not None
        record = logging.makeLogRecord({"msg": "begun by %s", "args": (ESCAPES,), "levelno": 30})
        logging.lastResort.handle(record)
        shown = warnings.formatwarning(ESCAPES, UserWarning, "f.py", 1, "")
    err = capsys.readouterr().err
    for text in (err, shown):
        assert "\\x1b]0;title\\x07" in text
        assert text.replace("\n", "").isprintable()
    assert "\x1b" in warnings.formatwarning(ESCAPES, UserWarning, "f.py", 1, "")  # as before


def test_a_class_that_a_spreadsheet_would_run(tmp_path: Path) -> None:
    names = ["=HYPERLINK(1)", "-1", "@x", "a", "-x"]
    rows = [{"prediction": n, "set90": [n, "b"], "entropy": -0.5, "p_=x": 1.0} for n in names]
    write_csv(tmp_path / "p.csv", rows)
    with (tmp_path / "p.csv").open(newline="") as file:
        head, *found = csv.reader(file)
    assert head == ["prediction", "set90", "entropy", "p_=x"]
    assert [row[0] for row in found] == ["'=HYPERLINK(1)", "-1", "'@x", "a", "'-x"]
    assert found[0][1:] == ["'=HYPERLINK(1)|b", "-0.5", "1.0"]


def test_a_comparison_with_nothing_but_methods(run, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"data": "digits", "methods": {"map": {"nll": 1}}}')
    code, out, err = run("report", tmp_path)
    assert code == 0, err
    assert "on digits" in out
    odd = {"data": 1, "notes": 3, "failed": [], "settings": None,
           "methods": {"a": {"nll": "x", "spread": []}, "b": {"nll": None, "accuracy": True}}}  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(odd))
    code, _, err = run("report", tmp_path)
    assert code == 0, err


def test_a_network_that_no_memory_can_hold(run, tmp_path: Path) -> None:
    size = ["--model-set", "hidden=[1000000000000]"]
    code, _, err = run("train", "--data", "digits", *size, "--out", tmp_path / "run")
    assert code == 2
    assert "torchbayes: the memory is full: use a smaller model" in err


def secret(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text('{"epoch": 1, "loss": 42.0}\n')
    (place / "pictures").mkdir()
    Image.new("L", (4, 4)).save(place / "pictures" / "secret.png")


@pytest.mark.parametrize("way", ["dots", "absolute", "link", "file link", "nul"])
def test_a_report_stays_inside_its_folder(tmp_path: Path, way: str) -> None:
    secret(tmp_path / "secret")
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    named = {"dots": "../secret", "absolute": str(tmp_path / "secret"), "nul": "a\0b"}.get(
        way, "runs/a"
    )
    if way == "link":
        (out / "runs" / "a").symlink_to(tmp_path / "secret")
    elif way == "file link":
        (out / "runs" / "a" / "pictures").mkdir(parents=True)
        link = out / "runs" / "a" / "pictures" / "p.png"
        link.symlink_to(tmp_path / "secret" / "pictures" / "secret.png")
    table = {"methods": {"map": {"nll": 1, "runs": [{"seed": 0, "folder": named, "nll": 1}]}}}
    (out / "results.json").write_text(json.dumps(table))
    results = load_results(out)
    (only,) = results.methods[0].runs
    assert only.history == ()
    assert only.extras.pictures == ()
    assert any("leads out of" in problem for problem in results.problems)


def _limited(size: int, *arguments: str) -> None:
    from torchbayes.cli import main

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    sys.argv = ["torchbayes", *arguments]
    main()


@pytest.mark.parametrize("kib", [1, 22, 30])
def test_a_limit_on_file_sizes_never_ends_well_with_files_missing(tmp_path: Path, kib: int) -> None:
    """Whatever is the first file that does not fit: settings, checkpoint or predictions."""
    out = tmp_path / "run"
    done = processes(1, _limited, kib << 10, "train", *QUICK, "--out", str(out))
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("torchbayes: ")
    assert "File too large" in last
    assert "Traceback" not in done.stderr
    assert not (out / "scores.json").exists()
    assert not list(out.glob(".*.part"))
    again = processes(1, _limited, 1 << 30, "train", *QUICK, "--out", str(out), "--resume")
    assert again.returncode == 0, again.stderr
    assert Predictions.load(out / "predictions.npz").draws == 1
