"""`torchbayes average` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torchbayes import metrics
from torchbayes.core.reading import read_json
from torchbayes.data import make_loader
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment
from torchbayes.posterior import Samples


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A hypernetwork with batch norm and an ensemble of four, both small, on digits."""
    folder = tmp_path_factory.mktemp("runs")
    hyper = {"latent_dim": 4, "hidden_dim": 4, "draws": 1, "strategy": "layer-wise"}
    settings = {
        "hypernet": ("wrn-10-1", {}, "hypernet", hyper),
        "ensemble": ("mlp", {"hidden": [16]}, "ensemble", {"members": 4}),
    }
    for name, (model, model_options, method, options) in settings.items():
        experiment = Experiment(
            model=model, model_options=model_options, method=method, options=options, epochs=1,
            examples=64,
        )  # fmt: skip
        data = experiment.load_data(None)
        train_experiment(experiment, folder / name, data=data, progress=False)
    return {name: folder / name for name in settings}


def test_ensemble_rows_are_its_members(run, runs: dict[str, Path]) -> None:
    code, out, err = run("average", runs["ensemble"], "--times", "1,4,16", "--json")
    assert code == 0, err
    (result,) = json.loads(out)
    assert [row["times"] for row in result["rows"]] == [1, 4]  # there are no sixteen
    trained = TrainedRun(runs["ensemble"])
    posterior = trained.posterior()
    assert isinstance(posterior, Samples)
    test = make_loader(trained.data, trained.data.test, 1000)
    inputs, targets = next(iter(test.batches(0)))
    with torch.no_grad():
        logits = torch.stack(
            [torch.func.functional_call(trained.model, draw, inputs) for draw in posterior]
        )
    four = result["rows"][1]
    probs = logits.mean(0).softmax(1)
    assert four["error"] == pytest.approx(1 - metrics.accuracy(probs, targets))
    assert four["nll"] == pytest.approx(metrics.nll(probs, targets), rel=1e-5)
    mixed = logits.softmax(2).mean(0)
    assert four["probabilities_nll"] == pytest.approx(metrics.nll(mixed, targets), rel=1e-5)
    singles = sorted(1 - metrics.accuracy(one.softmax(1), targets) for one in logits)
    assert result["rows"][0]["error"] == pytest.approx((singles[1] + singles[2]) / 2)
    assert result["quadruple_faults"] == metrics.fault_counts(logits.argmax(2), targets)
    assert "correlations" not in result


def test_hypernetwork(run, runs: dict[str, Path], tmp_path: Path) -> None:
    code, out, err = run(
        "average", runs["hypernet"], "--times", "1,4", "--out", tmp_path / "a.json"
    )
    assert code == 0, err
    assert "hypernet" in out
    (result,) = json.loads((tmp_path / "a.json").read_text())
    saved = read_json(runs["hypernet"] / "average-branching.json", "")
    assert saved.pop("made_with")["counts"] == [1, 4]
    assert saved == result
    assert [row["groups"] for row in result["rows"]] == [4, 1]
    assert sum(result["quadruple_faults"]) == pytest.approx(450)
    assert 0 <= result["correlations"]["between"] < result["correlations"]["within"] <= 1
    assert (runs["hypernet"] / "weights.png").stat().st_size > 1000
    for how in ("parallelizing", "widening"):
        code, out, err = run("average", runs["hypernet"], "--how", how, "--times", "2", "--json")
        assert code == 0, err
        assert json.loads(out)[0]["rows"][0]["times"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--how", "mixing"), "how is 'mixing': expected branching or parallelizing or widening"),
        (("--times", "0,x"), "times is '0,x': expected whole numbers such as 1,4,16"),
        (("--times", "8"), "only 4 networks"),
        (("--how", "widening", "--times", "2"), "cannot be widened"),
    ],
)
def test_bad_input(run, runs: dict[str, Path], arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run("average", runs["ensemble"], *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
