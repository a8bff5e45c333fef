"""Settings: the flat table of a file and the experiment that it stands for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchbayes.data import DataSet, PadCropFlip, Split
from torchbayes.experiments.settings import SETTINGS, Experiment
from torchbayes.train.schedule import Schedule


def test_a_file_has_the_schedules_arguments_beside_the_other_settings() -> None:
    table = {"epochs": 7, "schedule": "step", "milestones": [2, 5], "gamma": 0.5}
    experiment = Experiment.from_settings(table, "here")
    assert experiment == Experiment(epochs=7, schedule=Schedule("step", (2, 5), 0.5))
    flat = experiment.settings()
    course = {"epochs": 7, "schedule": "step", "milestones": (2, 5), "gamma": 0.5}
    unsaid = {"init": "", "reset": (), "memory_format": "", "compile": "", "augment_shift": 0}
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


def test_augmentation_shifts_by_as_much_as_is_asked_for() -> None:
    images = torch.full((3, 1, 4, 4), 255, dtype=torch.uint8)
    split = Split(images, torch.tensor([0, 1, 0]))
    data = DataSet(
        name="white", train=split, test=split, validation=None, classes=("a", "b"), shape=(1, 4, 4),
        mean=(0.0,), std=(1.0,), augment=PadCropFlip(pad=4),
    )  # fmt: skip
    usual = Experiment(augment=True).split(data).augment
    less = Experiment(augment=True, augment_shift=1).check().split(data).augment
    assert usual is data.augment
    assert less == PadCropFlip(pad=1)
    # Whatever is drawn, at most one row and one column of four are black.
    seen = less(images, torch.Generator().manual_seed(0))
    assert int((seen > 0).flatten(1).sum(1).min()) >= 9
    with pytest.raises(ValueError, match=r"augment_shift is 1, but no augmentation moves .* white"):
        Experiment(augment=True, augment_shift=1).split(dataclasses.replace(data, augment=None))
    with pytest.raises(ValueError, match="augment_shift is 2, but nothing is augmented"):
        Experiment(augment_shift=2).check()


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
