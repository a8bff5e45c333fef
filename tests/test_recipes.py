"""Every recipe is whole: its keys, its names and its options are real, in full and CPU-sized."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbayes.experiment import Experiment, recipe_settings
from torchbayes.methods import METHODS
from torchbayes.methods.base import check_options, find_method
from torchbayes.models import MODELS
from torchbayes.recipes import find_recipe, recipe_folder

FILES = sorted(recipe_folder().rglob("*.toml"))


@pytest.mark.parametrize("cpu", [False, True], ids=["full", "cpu"])
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(recipe_folder()).as_posix())
def test_recipe_is_valid(file: Path, cpu: bool) -> None:
    settings = recipe_settings(file, cpu=cpu)
    methods = settings.pop("methods", {})
    for method, options in methods.items():
        check_options(find_method(method), options)
    experiment = Experiment.from_settings(settings, str(file))
    assert experiment.network in MODELS
    assert methods or experiment.method in METHODS


def test_unknown_recipe_names_the_known_ones() -> None:
    assert find_recipe("demo/digits").is_file()
    with pytest.raises(ValueError, match="demo/digits"):
        find_recipe("demo/digit")
