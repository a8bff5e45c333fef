"""What is written by hand about this repository's records holds; `--check` covers what is generated."""

from __future__ import annotations

import json

from tools.records.__main__ import ROOT
from tools.records.readme import HEADLINE
from torchbayes.experiments.record import Record
from torchbayes.train.registry import METHODS


def test_the_headline_record_has_rows_of_methods_only() -> None:
    record = Record.load(ROOT / "results" / f"{HEADLINE}.json")
    assert record.rows.keys() <= METHODS.keys()


def test_what_the_page_of_atmc_says_of_thermostats_was_measured() -> None:
    """Within 5 % up to half the narrowest axis (0.1 wide) with noisy gradients; beyond it nothing helps."""
    record = json.loads((ROOT / "results" / "sampler-bias.json").read_text(encoding="utf-8"))
    (noisy,) = [errors for noise, errors in record["errors"].items() if float(noise) > 0]
    for name, errors in noisy.items():
        for step, error in zip(record["steps"], errors, strict=True):
            if step > 0.05:
                assert error > 0.05, (name, step)
            elif name in ("SGNHT", "ATMC"):
                assert error < 0.05, (name, step)
