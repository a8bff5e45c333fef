"""Small finished runs: digits with a calibration, and a regression on a table with levels and gaps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.conftest import run  # noqa: F401 (a fixture)
from torchbayes.cli import app

HOSTILE = "<img src=x onerror=alert(1)>"


def command(*words: str | Path) -> None:
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "digits"
    small = ["--epochs", "4", "--samples", "4", "--model-set", "hidden=[16]"]
    command("train", "--data", "digits", "--method", "swag", *small, "--out", folder, "--json")
    command("calibrate", folder, "--json")
    return folder


@pytest.fixture(scope="session")
def cars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose levels are markup, with some doors missing."""
    folder, chance = tmp_path_factory.mktemp("served"), random.Random(0)
    lines = ["weight,power,origin,doors,mpg"]
    for _ in range(120):
        weight, power = chance.uniform(800, 2200), chance.uniform(50, 200)
        origin, doors = chance.choice(["EU", "US", HOSTILE]), chance.choice(["3", "5", ""])
        mpg = 60 - 0.015 * weight - 0.08 * power + chance.gauss(0, 2)
        lines.append(f"{weight:.1f},{power:.1f},{origin},{doors},{mpg:.2f}")
    (folder / "cars.csv").write_text("\n".join(lines), encoding="utf-8")
    small = ["--epochs", "20", "--samples", "4", "--model-set", "hidden=[16]"]
    data = f"table:{folder / 'cars.csv'}"
    command("train", "--data", data, "--method", "ivon", *small, "--out", folder / "run", "--json")
    return folder / "run"
