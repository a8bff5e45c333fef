"""`tune` on networks, from Python and from the command line."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import torchbayes as tb
from torchbayes.cli import app
from torchbayes.core.reading import read_toml

torch.manual_seed(0)
X = torch.randn(240, 2)
Y = (X[:, 0] > 0).long()


def tune(**arguments):
    settings = {"epochs": 3, "batch_size": 40, "progress": False, "trials": 4, **arguments}
    return tb.tune(nn.Linear(2, 2), (X, Y), "map", **settings)


def test_the_score_is_the_nll_of_the_held_out_examples():
    """Every trial, repeated by hand."""
    torch.manual_seed(1)
    net = nn.Linear(2, 2)
    found = tb.tune(net, (X, Y), "map", trials=3, epochs=3, seed=3, progress=False)
    order = torch.randperm(240, generator=torch.Generator().manual_seed(3))
    held, rest = order[:48], order[48:]
    for trial in found.trials:
        run = tb.fit(
            net, (X[rest], Y[rest]), "map", epochs=3, seed=3, progress=False, **trial.options
        )
        with torch.no_grad():
            wanted = nn.functional.cross_entropy(run.model(X[held]), Y[held])
        assert trial.nll == pytest.approx(float(wanted), rel=1e-5)
    assert found.nll == min(t.nll for t in found.trials if t.nll is not None)


def test_what_cannot_be_searched_is_one_sentence():
    with pytest.raises(ValueError, match="has no option 'momentun'"):
        tune(space={"momentun": (0.1, 0.9)})
    with pytest.raises(ValueError, match="lr is both given and in the space"):
        tune(space={"lr": (0.1, 0.9)}, lr=0.1)
    with pytest.raises(ValueError, match=r"validation is 1\.5"):
        tune(validation=1.5)
    loader = DataLoader(TensorDataset(X, Y), 40)
    with pytest.raises(ValueError, match="a DataLoader cannot be divided: pass held-out data"):
        tb.tune(nn.Linear(2, 2), loader, trials=1)
    found = tb.tune(nn.Linear(2, 2), loader, validation=(X, Y), trials=2, epochs=1, progress=False)
    assert len(found.trials) == 2
    with pytest.raises(ValueError, match="trials is 0"):
        tune(trials=0)


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


BASE = ("--data", "moons", "--epochs", 2, "--model-set", "hidden=[8]")


def test_the_command_writes_a_recipe_that_train_and_compare_take(tmp_path):
    out = tmp_path / "search"
    shown = run("tune", *BASE, "--method", "swag", "--trials", 3, "--space", "lr=0.001:0.1",
                "--space", "rank=[2,4]", "--out", out, "--json")  # fmt: skip
    told = json.loads(shown.stdout)
    assert len(told["trials"]) == 3
    recipe = read_toml(out / "recipe.toml")
    assert recipe["method"] == "swag"
    assert recipe["options"] == told["best"]
    assert recipe["methods"] == {"swag": told["best"]}
    assert "validation" not in recipe  # what was held out is trained on again
    run("train", "--recipe", out / "recipe.toml", "--out", tmp_path / "run")
    config = read_toml(tmp_path / "run" / "config.toml")
    assert {name: config["options"][name] for name in told["best"]} == told["best"]
    run("compare", "--recipe", out / "recipe.toml", "--out", tmp_path / "table")
    results = json.loads((tmp_path / "table" / "results.json").read_text())
    assert list(results["methods"]) == ["swag"]

    with pytest.raises(ValueError, match="already holds a search"):
        run("tune", *BASE, "--method", "swag", "--trials", 3, "--out", out)
    more = run("tune", *BASE, "--method", "swag", "--trials", 4, "--space", "lr=0.001:0.1",
               "--space", "rank=[2,4]", "--out", out, "--resume", "--json")  # fmt: skip
    assert json.loads(more.stdout)["trials"][:3] == told["trials"]
    with pytest.raises(ValueError, match="neither a range"):
        run("tune", *BASE, "--space", "lr=0.1", "--out", tmp_path / "other")


def test_compare_gives_every_method_the_same_trials(tmp_path):
    out = tmp_path / "table"
    run("compare", *BASE, "--methods", "map,swag", "--tune", 2, "--out", out)
    results = json.loads((out / "results.json").read_text())
    assert set(results["methods"]) == {"map", "swag"}
    for name in ("map", "swag"):
        assert (out / "tuning" / name / "study.db").exists()
    run("compare", *BASE, "--methods", "map,swag", "--tune", 2, "--out", out, "--resume")
