"""`torchbayes recipes`: recipes are listed and shown, and a run leaves a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchbayes.cli import app
from torchbayes.core.errors import RunError
from torchbayes.core.reading import read_json
from torchbayes.experiments import recipes
from torchbayes.experiments.compare import Comparison
from torchbayes.experiments.record import Bins, Record
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.train.registry import METHODS
from torchbayes.train.run_folder import RunFolder

RECIPE = """
title = "A tiny network"
paper = "Nobody's"
data = "digits"
method = "bbb"
after = ["prune"]
epochs = 50
samples = 2

[model_options]
hidden = [8]

[cpu]
epochs = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one recipe."""
    (tmp_path / "recipes" / "tiny").mkdir(parents=True)
    (tmp_path / "recipes" / "tiny" / "digits.toml").write_text(RECIPE)
    monkeypatch.setattr(recipes, "recipe_folder", lambda: tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["recipes", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_run_records_what_the_runs_measured(folder: Path) -> None:
    shown = call("run", "tiny/digits", "--cpu", "--seeds", "2")
    assert "98 % removed" in shown
    assert "results/tiny/digits.json" in shown
    record = json.loads((folder / "results" / "tiny" / "digits.json").read_text())
    runs = folder / "runs" / "recipes" / "tiny" / "digits" / "cpu" / "runs"
    scores = [json.loads((runs / f"bbb-{seed}" / "scores.json").read_text()) for seed in (0, 1)]
    pruned = [
        json.loads((runs / f"bbb-{seed}" / "prune.json").read_text())["rows"] for seed in (0, 1)
    ]
    row = record["rows"]["bbb"]
    assert row["accuracy"]["values"] == [s["accuracy"] for s in scores]
    assert row["error"]["values"] == [1 - s["accuracy"] for s in scores]
    assert row["pruned_98_error"]["values"] == [p[-1]["error"] for p in pruned]
    assert record["command"] == "torchbayes recipes run tiny/digits --cpu --seeds 2"
    assert record["settings"]["epochs"] == 1
    assert record["size"] == "cpu"
    assert record["versions"].keys() == {"torchbayes", "torch", "python"}
    bins = [Bins.of(Predictions.load(runs / f"bbb-{seed}" / "predictions.npz")) for seed in (0, 1)]
    saved = Record.load(folder / "results" / "tiny" / "digits.json")
    assert saved.calibration == {"bbb": tuple(bins)}


def test_cpu_and_full_versions_never_share_a_folder(folder: Path) -> None:
    call("run", "tiny/digits", "--cpu")
    file = folder / "recipes" / "tiny" / "digits.toml"
    file.write_text(file.read_text().replace("epochs = 50", "epochs = 2"))
    call("run", "tiny/digits")
    record = json.loads((folder / "results" / "tiny" / "digits.json").read_text())
    assert (record["size"], record["settings"]["epochs"]) == ("full", 2)
    runs = folder / "runs" / "recipes" / "tiny" / "digits"
    counts = {
        size: len(RunFolder(runs / size / "runs" / "bbb-0").read_metrics())
        for size in ("cpu", "full")
    }
    assert counts == {"cpu": 1, "full": 2}
    full = read_json(runs / "full" / "runs" / "bbb-0" / "scores.json", "")
    assert record["rows"]["bbb"]["accuracy"]["values"] == [full["accuracy"]]
    with pytest.raises(RunError, match="holds a run with epochs = 1, not 2"):
        call("run", "tiny/digits", "--out", str(runs / "cpu"))


STRATEGIES = """
title = "Two strategies"
data = "digits"
model = "wrn-10-1"
method = "hypernet"
after = ["average"]
epochs = 1
samples = 1
examples = 64

[rows.block-wise]
options = { strategy = "block-wise", latent_dim = 2, hidden_dim = 2, draws = 1 }

[rows.layer-wise]
options = { strategy = "layer-wise", latent_dim = 2, hidden_dim = 2, draws = 1 }
"""


def test_every_strategy_is_averaged_in_its_own_way(folder: Path) -> None:
    (folder / "recipes" / "tiny" / "strategies.toml").write_text(STRATEGIES)
    call("run", "tiny/strategies")
    rows = json.loads((folder / "results" / "tiny" / "strategies.json").read_text())["rows"]
    runs = folder / "runs" / "recipes" / "tiny" / "strategies" / "full" / "runs"
    own = {"block-wise": ("parallelizing", (1, 4, 16)), "layer-wise": ("widening", (1, 4))}
    for name, (how, times) in own.items():
        found = json.loads((runs / f"{name}-0" / f"average-{how}.json").read_text())
        assert [row["times"] for row in found["rows"]] == list(times)
        for row in found["rows"]:
            assert rows[name][f"x{row['times']}_error"]["mean"] == row["error"]
        whole = json.loads((runs / f"{name}-0" / "average-branching.json").read_text())
        assert rows[name]["quadruple_faults"]["mean"] == whole["quadruple_faults"][4]
        assert rows[name]["correlation_between"]["mean"] == found["correlations"]["between"]


def test_list_and_show(folder: Path) -> None:
    assert json.loads(call("list", "--json")) == [
        {"name": "tiny/digits", "title": "A tiny network", "from": "Nobody's"}
    ]
    lines = [line.strip() for line in call("list").splitlines()]
    assert lines == ["tiny/digits  Nobody's", "A tiny network"]
    assert call("show", "tiny/digits") == RECIPE
    small = call("show", "tiny/digits", "--cpu").splitlines()
    assert "epochs = 1" in small
    assert "samples = 2" in small
    assert '    "prune",' in small
    assert "epochs = 50" not in small
    assert "[cpu]" not in small


def test_bad_input_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="no recipe 'tiny/digit': choose one of tiny/digits"):
        call("show", "tiny/digit")
    with pytest.raises(ValueError, match="seeds is 0"):
        call("run", "tiny/digits", "--seeds", "0")


def test_a_bare_comparison_takes_methods_that_the_demo_does_not_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "recipes" / "demo").mkdir()
    (folder / "recipes" / "demo" / "digits.toml").write_text('data = "digits"\n[methods.map]\n')
    planned: list[str] = []

    def run(plan: Comparison, *_: object) -> None:
        planned.extend(job.row.name for job in plan.jobs)
        raise ValueError("planned")

    monkeypatch.setattr(Comparison, "run", run)
    with pytest.raises(ValueError, match="planned"):
        CliRunner().invoke(app, ["compare", "--out", "out"], catch_exceptions=False)
    assert sorted(planned) == sorted(METHODS)
