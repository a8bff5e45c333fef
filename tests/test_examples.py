"""Every example runs, is at most 60 lines long, and prints that it has learned something."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
NAMED = {
    "continual_learning", "distributed", "image_classification", "ood_alarm", "own_model", "regression",
}  # fmt: skip
FILES = sorted(FOLDER.glob("*.py"))


def first_share(text: str) -> float:
    found = re.search(r"([\d.]+)%", text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_short_and_says_how_to_run_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"examples/{file.name}" in text


def test_all_that_the_documentation_names_are_there() -> None:
    assert {file.stem for file in FILES} >= NAMED


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["image_classification", "own_model", "distributed"])
def test_it_learns_the_digits(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    assert first_share(printed(name, capsys)) > 85


def test_laplace_tells_what_the_network_has_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(
        r"([\d.]+)% right, NLL ([\d.]+), AUROC ([\d.]+)", printed("trained_network", capsys)
    )
    before, after = ([float(number) for number in row] for row in rows)
    assert before[0] > 90
    assert after[0] > before[0] - 1
    assert after[1] < before[1]
    assert after[2] > before[2]


def test_the_alarm_rings_for_strange_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("ood_alarm", capsys)
    false, true = (float(share) for share in re.findall(r"([\d.]+)%", text))
    assert true > 3 * false


def test_the_curve_knows_where_it_has_no_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["regression", str(tmp_path / "curve.png")])
    text = printed("regression", capsys)
    near, far = (float(doubt) for doubt in re.findall(r"of which ([\d.]+)", text))
    assert far > 3 * near
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_the_posterior_as_prior_forgets_less(capsys: pytest.CaptureFixture[str]) -> None:
    forgotten = re.findall(r"([\d.]+)% forgotten", printed("continual_learning", capsys))
    assert float(forgotten[1]) < float(forgotten[0])


@pytest.mark.parametrize(
    ("name", "pictures"),
    [
        ("landscape", ["landscape.png"]),
        ("moons", ["moons.png"]),
        ("vogn_2d", ["vogn_2d.png"]),
        ("weights", ["signal-to-noise.png", "weights.png"]),
    ],
)
def test_it_draws_its_pictures(
    name: str, pictures: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path if len(pictures) > 1 else tmp_path / pictures[0]
    monkeypatch.setattr(sys, "argv", [name, str(out)])
    monkeypatch.syspath_prepend(FOLDER)  # as `python examples/NAME.py` does
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert sorted(file.name for file in tmp_path.iterdir()) == pictures
    assert all(file.stat().st_size > 10_000 for file in tmp_path.iterdir())


@pytest.mark.filterwarnings("default")
def test_lightning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    assert first_share(printed("lightning_posterior", capsys)) > 85


@pytest.mark.filterwarnings("default")
def test_lora(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    text = printed("lora", capsys)
    assert first_share(text) > 90
    size = re.search(r"([\d.]+) kB", text)
    assert size is not None
    assert float(size[1]) < 15


def test_two_processes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, str(FOLDER / "distributed.py")],
        capture_output=True, text=True, timeout=280, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 process(es)")
    assert first_share(done.stdout) > 85
