"""A small part of each campaign, so that they keep working and a new fault is found early."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from . import cases, damage, kills, steady, table, writes


def test_damaged_files(tmp_path: Path) -> None:
    counts = Counter(said for _, said in islice(damage.rounds(tmp_path, seed=0), 800))
    assert set(counts) <= {"clean", "unchanged", "read"}
    assert counts["clean"] > 400


@pytest.mark.parametrize("on_disk", [False, True])
def test_kills_before_operations_on_files(on_disk: bool, tmp_path: Path) -> None:
    killer = kills.Killer(cases.fit_case("sgld" if on_disk else "map", on_disk), tmp_path / "k", 0)
    assert [killer.kill(at) for at in (3, 9, 14, 22)] == ["equal"] * 4


def test_killed_commands_on_a_finished_run_leave_nothing(tmp_path: Path) -> None:
    # Before the rename of calibration.json, which leaves its temporary file.
    case = next(c for c in cases.all_cases() if c.name == "torchbayes calibrate")
    assert kills.Killer(case, tmp_path / "k", 0).kill(4) == "equal"


def test_writes_that_fail(tmp_path: Path) -> None:
    found = list(islice(writes.rounds([cases.fit_case("map")], tmp_path, 0), 5))
    assert {said for _, said in found} <= {"one sentence", "not needed"}
    assert "one sentence" in {said for _, said in found}


def test_memory_is_steady() -> None:
    assert steady.measure("VOGN", 0.05) == "steady"


def test_every_resumable_command_is_killed() -> None:
    names = {case.name for case in cases.all_cases()}
    assert {
        f"torchbayes {c}" for c in ("train", "compare", "recipes run", "continual", "tune")
    } <= names


def test_the_table_adds_up_runs_and_names_what_is_bad() -> None:
    runs = [
        {"began": "now", "commit": "abc", "seed": n, "minutes": 1.0,
         "tables": {"kills": {"map": {"equal": 3 + n}}, "memory": {"VOGN": {"steady": 1, "grew": n}}}}
        for n in range(2)
    ]  # fmt: skip
    lines = table.text(runs).splitlines()
    assert "| **all** |  |  | 2.0 | 7 | 7 | 0 | 1 |" in lines
    assert "| map | 7 | 7 | 0 |" in lines
    assert table.bad(runs) == ["memory: VOGN: grew (1 times)"]
