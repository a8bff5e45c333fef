"""A small part of each campaign, so that they keep working and a new fault is found early."""

from __future__ import annotations

from . import damage, kills


def test_damaged_files() -> None:
    for name, counts in damage.campaign(120.0, seed=0, most=60).items():
        bad = {key: number for key, number in counts.items() if key not in ("clean", "unchanged")}
        assert not bad, f"{name}: {bad}"
        assert counts["clean"] > 20


def test_kills_before_operations_on_files() -> None:
    cases = [kills.Case("map"), kills.Case("sgld", on_disk=True)]
    found = kills.campaign(cases, 600.0, points=[3, 9, 14, 22])
    assert not found.bad
    assert found.kills == found.equal == 8
