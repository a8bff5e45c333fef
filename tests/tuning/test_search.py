"""The search itself, on functions whose minimum is known."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from torchbayes.core.errors import FileError, RunError
from torchbayes.train.failures import TrainingError
from torchbayes.tuning import Search

SPACE = {"lr": (1e-4, 1.0), "rank": [1, 2, 3]}


def bowl(number, options, report):
    """Least at lr = 0.01, rank = 2; the defaults are worse than that, and better than most."""
    if not options:
        return 2.0
    return (math.log10(options["lr"]) + 2) ** 2 + abs(options["rank"] - 2)


def search(folder: Path | None = None, resume: bool = False, space=None, **about) -> Search:
    return Search("map", space or SPACE, about, folder=folder, resume=resume, epochs=8)


def test_the_minimum_is_found_and_the_defaults_come_first():
    found = search().run(bowl, trials=40)
    assert found.trials[0].options == {}
    assert found.default_nll == 2.0
    assert len(found.trials) == 40
    assert found.best["rank"] == 2
    assert 0.003 < found.best["lr"] < 0.03
    assert found.nll == bowl(0, found.best, None)


def test_whole_numbers_and_words_keep_their_kind():
    space = {"rank": (1, 20), "kind": ["a", "b"], "flag": [True, False]}
    found = search(space=space).run(lambda n, options, r: 0.0, trials=12)
    for trial in found.trials[1:]:
        assert isinstance(trial.options["rank"], int)
        assert trial.options["kind"] in ("a", "b")
        assert isinstance(trial.options["flag"], bool)


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    whole = search().run(bowl, trials=14)

    def stopped(number, options, report):
        if number == 5:
            raise KeyboardInterrupt
        return bowl(number, options, report)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path).run(stopped, trials=14)
    again = search(tmp_path, resume=True).run(bowl, trials=14)
    assert [t.options for t in again.trials] == [t.options for t in whole.trials]
    assert [t.nll for t in again.trials] == [t.nll for t in whole.trials]


def _killed(folder, at):
    def objective(number, options, report):
        if number == at:
            os._exit(9)
        return bowl(number, options, report)

    search(folder, resume=True).run(objective, trials=6)


def _shared(folder):
    def objective(number, options, report):
        time.sleep(0.05)
        return bowl(number, options, report)

    search(folder, resume=True).run(objective, trials=9)


@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_killed_process_s_trial_is_tried_again(tmp_path, at):
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path, at))
    process.start()
    process.join()
    assert process.exitcode == 9
    found = search(tmp_path, resume=True).run(bowl, trials=6)
    assert [t.options for t in found.trials] == [t.options for t in search().run(bowl, 6).trials]
    assert not list(tmp_path.glob(".trial-*"))


def test_processes_share_the_trials(tmp_path):
    search(tmp_path)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_shared, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    found = search(tmp_path, resume=True).result()
    assert len(found.trials) == 9
    assert sum(not t.options for t in found.trials) == 1


def test_trials_that_are_behind_end_early():
    epochs = []

    def objective(number, options, report):
        level = 1.0 if number < 10 else 5.0
        for epoch in range(8):
            epochs.append(number)
            report.metrics(epoch, {"validation_nll": level})
        return level

    found = search().run(objective, trials=12)
    assert [t.state for t in found.trials] == ["complete"] * 10 + ["pruned"] * 2
    assert epochs.count(11) < 8
    assert "2 pruned" in repr(found)


def test_a_trial_that_breaks_down_is_one_of_the_trials():
    def objective(number, options, report):
        if number == 0:
            raise TrainingError("the loss is not finite", step=3, layer="fc")
        return math.nan if number == 1 else 1.0

    found = search().run(objective, trials=4)
    assert [t.state for t in found.trials] == ["failed", "failed", "complete", "complete"]
    assert found.trials[0].why == "the loss is not finite"
    assert found.default_nll is None
    with pytest.raises(ValueError, match="none of the 2 trials of map ended well: the loss"):
        search().run(objective, trials=2).best  # noqa: B018


def test_other_settings_are_refused_and_the_difference_is_named(tmp_path):
    search(tmp_path, epochs=5).run(bowl, trials=2)
    with pytest.raises(RunError, match="already holds a search: resume it"):
        search(tmp_path, epochs=5)
    with pytest.raises(RunError, match="epochs 5, not 6"):
        search(tmp_path, resume=True, epochs=6)
    with pytest.raises(RunError, match="space"):
        search(tmp_path, resume=True, space={"lr": (1e-3, 1.0)}, epochs=5)


def test_a_damaged_file_is_one_sentence(tmp_path):
    search(tmp_path).run(bowl, trials=2)
    (tmp_path / "study.db").write_bytes(b"SQLite format 3\0" + bytes(5000))
    with pytest.raises(FileError, match="cannot be read or written"):
        search(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1.0, 0.1), "the lower number first"),
        ("flat", "a pair"),
        ([3], "a pair"),
        ([[1], [2]], "expected numbers"),
    ],
)
def test_a_space_that_cannot_be_searched(values, message):
    with pytest.raises(ValueError, match=message):
        search(space={"lr": values})
