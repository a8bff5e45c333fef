"""Settings: the flat table of a file and the experiment that it stands for."""

from __future__ import annotations

import dataclasses

import pytest

from torchbayes.experiments.settings import SETTINGS, Experiment
from torchbayes.train.schedule import Schedule


def test_a_file_has_the_schedules_arguments_beside_the_other_settings() -> None:
    table = {"epochs": 7, "schedule": "step", "milestones": [2, 5], "gamma": 0.5}
    experiment = Experiment.from_settings(table, "here")
    assert experiment == Experiment(epochs=7, schedule=Schedule("step", (2, 5), 0.5))
    flat = experiment.settings()
    course = {"epochs": 7, "schedule": "step", "milestones": (2, 5), "gamma": 0.5}
    unsaid = {"init": "", "reset": (), "memory_format": "", "compile": ""}
    assert {**unsaid, **flat} == {**SETTINGS, **course}
    assert Experiment.from_settings(flat, "here") == experiment
    own = {f.name for f in dataclasses.fields(Experiment)}
    schedule = {f.name for f in dataclasses.fields(Schedule)} - {"name"}
    assert SETTINGS.keys() == own | schedule


def test_a_start_is_a_setting_if_there_is_one() -> None:
    """A run from random weights does not mention it: those of older versions can be resumed."""
    assert not {"init", "reset"} & Experiment().settings().keys()
    flat = Experiment(init="net.safetensors", reset=("head",)).settings()
    assert (flat["init"], flat["reset"]) == ("net.safetensors", ("head",))
    with pytest.raises(ValueError, match=r"reset is \['head'\], but all weights start at random"):
        Experiment(reset=("head",)).check()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"milestone": [1]}, "here has an unknown key 'milestone': did you mean 'milestones'"),
        ({"cycles": 1.5}, "here: cycles is 1.5, expected a value such as 1"),
        ({"schedule": "steps"}, "schedule is 'steps'"),
        ({"name": "step"}, "unknown key 'name'"),
    ],
)
def test_a_wrong_setting_is_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experiment.from_settings(table, "here")
