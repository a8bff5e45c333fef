"""Verdicts follow from the figures, and conditions can do nothing but compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.records.claims import Claim, judge, read_claims
from tools.records.page import read_reported, results_pages
from torchbayes.experiments.record import Record, record_of

RUNS = [{"seed": 0, "error": 0.02, "seconds": 30.0}, {"seed": 1, "error": 0.04, "seconds": 90.0}]
RESULTS = {
    "created": "2026-01-02T03:04:05+00:00",
    "settings": {"epochs": 3, "seeds": [0, 1], "seed": 0},
    "methods": {"bbb": {"settings": {}, "runs": RUNS}},
}
CLAIM = Claim(
    "A paper",
    "Table 1",
    "It is good",
    "1 %",
    {"error": "paper/name#bbb/error"},
    "{error:.1%}",
    "error <= 0.01",
    "error <= 0.05",
)


@pytest.fixture
def record() -> Record:
    return record_of("paper/name", "A title", "cpu", "torchbayes recipes run paper/name", RESULTS)


@pytest.mark.parametrize(
    ("reproduced", "partly", "verdict"),
    [
        ("error <= 0.03", "", "reproduced"),
        ("error <= 0.01", "error - error_spread < 0.03", "partly reproduced"),
        ("error <= 0.01", "error + error_spread < 0.03", "not reproduced"),
        ("0 < error < 1 and -error * 2 / 2 < 0", "", "reproduced"),
        ("error > 1 or error < 0", "", "not reproduced"),
        ("(error < 1) + (error < 2) + (error > 1) >= 2", "", "reproduced"),
        ("(error < 1) + (error < 2) + (error > 1) >= 3", "", "not reproduced"),
    ],
)
def test_verdict_follows_from_the_figures(
    record: Record, reproduced: str, partly: str, verdict: str
) -> None:
    found = judge(replace(CLAIM, reproduced=reproduced, partly=partly), {"paper/name": record})
    assert found.verdict == verdict
    assert found.ours == "3.0 ± 1.4 %"


def test_without_a_record_it_was_not_run(record: Record) -> None:
    both = replace(CLAIM, figures={**CLAIM.figures, "other": "paper/other#x/y"})
    assert judge(CLAIM, {}).verdict == "not run"
    assert judge(both, {"paper/name": record}).verdict == "not run"


def test_time_is_judged_by_the_benchmark(record: Record) -> None:
    claim = replace(
        CLAIM,
        figures={"step": "benchmarks#net/bbb"},
        shown="{step:.2f}",
        reproduced="step < 1.1",
        partly="",
    )
    steps = {"net": {"steps": {"bbb": {"ratio": 1.25, "low": 1.0, "high": 1.3}, "sgd": {}}}}
    found = judge(claim, {"paper/name": record}, steps)
    assert (found.verdict, found.ours) == ("not reproduced", "1.25")
    page = results_pages([found], {}, {}, {})["results/a-paper.md"]
    assert "| 1.25<br>*`make bench`* |" in page
    for other in ({}, {"net": {"steps": {"bbb": {}}}}):
        assert judge(claim, {}, other).verdict == "not run"


def test_a_wrong_score_is_named(record: Record) -> None:
    wrong = replace(CLAIM, figures={"error": "paper/name#bbb/eror"})
    with pytest.raises(ValueError, match=r"no bbb/eror: it has bbb/error, bbb/seconds"):
        judge(wrong, {"paper/name": record})


@pytest.mark.parametrize(
    "condition", ["__import__('os')", "error.real < 1", "error", "eror < 1", "error <", "'a' < 'b'"]
)
def test_conditions_only_compare(record: Record, condition: str) -> None:
    with pytest.raises(ValueError, match="cannot judge by"):
        judge(replace(CLAIM, reproduced=condition), {"paper/name": record})


def test_claims_file(tmp_path: Path) -> None:
    file = tmp_path / "claims.toml"
    file.write_text('[[claim]]\npaper="P"\nwhere="T"\ntext="x"\nreported="1"\n')
    assert read_claims(file) == [Claim("P", "T", "x", "1")]
    file.write_text('[[claim]]\npaper="P"\nverdict="reproduced"\n')
    with pytest.raises(ValueError, match=r"claim 1 is not as expected.*verdict"):
        read_claims(file)


def test_page_shows_claims_and_records(record: Record) -> None:
    records = {"paper/name": record}
    odd = replace(CLAIM, text="Odd | text", figures={})
    judged = [judge(replace(claim, paper="Paper"), records) for claim in (CLAIM, odd)]
    pages = results_pages(judged, records, {}, {})
    assert set(pages) == {"results.md", "results/paper.md"}
    assert "| [Paper](results/paper.md) | 0 | 1 | 0 | 1 |" in pages["results.md"].splitlines()
    lines = pages["results/paper.md"].splitlines()
    row = (
        "| **partly reproduced** | It is good (Table 1) | 1 % | "
        "3.0 ± 1.4 %<br>*3 epochs, 2 seeds, 2 min* |"
    )
    assert row in lines
    assert any("Odd \\| text" in line and "**not run**" in line for line in lines)
    assert "| bbb | 60 ± 42 |" in lines
    assert "`torchbayes recipes run paper/name`" in lines


def test_page_says_what_was_trained(record: Record) -> None:
    shared = {
        "data": "cifar10",
        "model": "resnetpp8",
        "model_options": {"width": 8},
        "batch_size": 64,
    }
    own = {"sgd": {}, "batchnorm": {"model": "resnet8"}}
    small = replace(
        record, settings={**shared, "examples": 5000, "validation": 0.1, "augment": True}, own=own
    )
    said = (
        "Trained in the CPU-sized version: resnetpp8 (width 8) and resnet8 (width 8) on cifar10, 5,000 "
        "training examples, 10% of them held out, batches of 64, augmented; settings and notes: "
        "`recipes/paper/name.toml`"
    )
    assert said in results_pages([], {"paper/name": small}, {}, {})["results/paper.md"]
    whole = replace(small, size="full", settings={**shared, "examples": 0, "augment": False})
    assert (
        "cifar10, all training examples, batches of 64; settings"
        in results_pages([], {"a/b": whole}, {}, {})["results/a.md"]
    )


def test_the_papers_figures_stand_beside_ours(record: Record, tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    reported = "[reported]\nbbb = { error = 0.0132, nll = 0.5 }\nsgd = { error = 0.02 }\n"
    (tmp_path / "paper" / "name.toml").write_text(reported)
    (tmp_path / "paper" / "never.toml").write_text('title = "x"\n')
    page = results_pages([], {"paper/name": record}, read_reported(tmp_path), {})[
        "results/paper.md"
    ]
    lines = page.splitlines()
    assert "| method | error, ours | error, paper |" in lines  # no NLL of ours
    assert "| bbb | 3.00% | *1.32%* |" in lines
    assert not any(line.startswith("| sgd") for line in lines)
    assert "Recipes without a record: `paper/never`." in lines
