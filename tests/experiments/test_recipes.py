"""Every recipe is whole: its keys, its names and its options are real, in full and CPU-sized."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbayes.experiments.compare import rows_from
from torchbayes.experiments.options import check_spelling
from torchbayes.experiments.recipes import find_recipe, recipe_folder, recipe_settings
from torchbayes.experiments.settings import Experiment
from torchbayes.models import MODELS
from torchbayes.train.registry import METHODS, find_method

FILES = sorted(recipe_folder().glob("*/*.toml"))


@pytest.mark.parametrize("cpu", [False, True], ids=["full", "cpu"])
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(recipe_folder()).as_posix())
def test_recipe_is_valid(file: Path, cpu: bool) -> None:
    settings = recipe_settings(file, cpu=cpu)
    methods, tables = settings.pop("methods", {}), settings.pop("rows", {})
    for method, options in methods.items():
        check_spelling(find_method(method), options)
    experiment = Experiment.from_settings(settings, str(file))
    assert experiment.network in MODELS
    assert methods or tables or experiment.method in METHODS
    for row in rows_from(tables, settings, {}, {}):
        assert row.experiment.network in MODELS


def test_atmc_table_one_has_the_papers_settings() -> None:
    """Section 5.1: the last of each cycle of 50 epochs after 150, of 1000: 17 samples."""
    settings = recipe_settings(find_recipe("atmc/cifar10-table1"))
    rows = {row.name: row for row in rows_from(settings.pop("rows"), settings, {}, {})}
    assert rows["atmc-single"].last_of == "atmc"
    for name in ("atmc", "sgnht"):
        experiment = rows[name].experiment
        assert (experiment.network, experiment.method) == ("resnetpp56", name)
        ends = experiment.schedule.cycle_ends(experiment.epochs, 391)
        assert sum(end > experiment.options["burn_in"] * 1000 * 391 for end in ends) == 17
    assert rows["sgd-batchnorm"].experiment.network == "resnet56"


def test_unknown_recipe_names_the_known_ones() -> None:
    assert find_recipe("demo/digits").is_file()
    with pytest.raises(ValueError, match="demo/digits"):
        find_recipe("demo/digit")
