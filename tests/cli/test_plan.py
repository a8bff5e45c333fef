"""What a comparison shows while it runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from torchbayes.cli.compare import _result
from torchbayes.cli.plan import PlanDisplay, clock, seconds_left
from torchbayes.experiments.compare import Job, Row
from torchbayes.experiments.settings import Experiment


def test_time_left_by_hand() -> None:
    assert seconds_left(["map"], {}) is None
    assert seconds_left(["map"], {}, ("map", 0.1, 0.001)) is None
    # Another seed of the same row is the best guess, the mean of the rows the next best.
    assert seconds_left(["a", "new"], {"a": [1.0, 3.0], "b": [6.0]}) == pytest.approx(2 + 4)
    # A run that is a quarter done after 5 s has 15 s to go; its row then takes 20 s.
    assert seconds_left(["a", "b"], {"b": [2.0]}, ("a", 5.0, 0.25)) == pytest.approx(15 + 20 + 2)
    # Just begun: what its other seed took.
    assert seconds_left([], {"a": [8.0]}, ("a", 1.0, 0.0)) == pytest.approx(7)
    assert clock(59.6) == "1:00"


def test_what_runs_what_is_left_and_what_came_out(tmp_path: Path) -> None:
    job = Job(Row("map", Experiment()), Experiment(), tmp_path)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, color_system=None)
    display = PlanDisplay(["map", "mle", "dropout"], console)
    with display.bars:
        run = display.of(0)
        run.start("map", 10, 0)
        with run:
            for _ in range(5):
                run.advance(0.5)
            display.bars.refresh()
        display.finished(0, _result(job, {"accuracy": 0.97, "nll": 0.1}))
        failing = display.of(1)
        failing.start("mle", 10, 0)
        with pytest.raises(ValueError, match="no good"), failing:
            raise ValueError("no good [bold]")
        display.bars.refresh()
    shown = file.getvalue()
    assert "0 of 3 runs, then mle, dropout" in shown
    assert "loss 0.5000" in shown
    assert "done map (seed 0): accuracy 97.00%, NLL 0.1000" in shown
    assert "failed mle: no good [bold]" in shown
    assert "2 of 3 runs, then dropout" in shown
