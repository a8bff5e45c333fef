"""`torchbayes laplace` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torchbayes as tb
from torchbayes.data import make_loader
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment
from torchbayes.train.run_folder import RunFolder


def trained(folder: Path, **settings: object) -> Path:
    experiment = Experiment(**{"epochs": 3, "examples": 300, **settings})  # type: ignore[arg-type]
    train_experiment(experiment, folder, data=experiment.load_data(None), progress=False)
    return folder


@pytest.mark.filterwarnings("ignore:the network is not at a maximum")
def test_a_classifier(run, tmp_path: Path) -> None:
    folder = trained(tmp_path / "digits", model_options={"hidden": [32]}, model="mlp")
    before = (folder / "posterior.safetensors").read_bytes()
    code, out, err = run("laplace", folder, "--json")
    assert code == 0, err
    result = json.loads(out)
    rows = result["scores"]
    assert list(rows) == ["map", "laplace, draws", "laplace, linearised"]
    assert (folder / "posterior.safetensors").read_bytes() == before
    new = TrainedRun(Path(result["run"]))
    assert new.experiment.method == "laplace"
    # The same posterior by hand.
    old = TrainedRun(folder)
    tb.posterior.posterior.assign(old.model, old.posterior().mean())
    la = tb.Laplace(
        old.model.eval(), make_loader(old.data, old.data.train, 128), subset="last_layer",
        check=False,
    )  # fmt: skip
    la.optimize_prior()
    for mine, hers in zip(
        new.posterior().sample(torch.Generator().manual_seed(1)).values(),
        la.posterior(old.posterior().mean()).sample(torch.Generator().manual_seed(1)).values(),
        strict=True,
    ):
        assert torch.equal(mine, hers)
    targets = old.data.test.targets
    linearised = la.predictive(
        make_loader(old.data, old.data.test, 1000), generator=torch.Generator().manual_seed(0)
    )
    nll = -float(linearised.log_prob(targets).mean())
    assert rows["laplace, linearised"]["nll"] == pytest.approx(nll, rel=1e-4)
    # The other commands take the new folder, and its name is not used twice.
    assert run("evaluate", result["run"])[0] == 0
    assert run("report", result["run"])[0] == 0
    page = (Path(result["run"]) / "report.html").read_text("utf-8")
    assert "kronecker over the last layer" in page
    code, _, err = run("laplace", folder)
    assert code == 2
    assert "already holds a run" in err
    # Killed before the scores, which come last: the same command makes them.
    (Path(result["run"]) / "scores.json").unlink()
    code, out, err = run("laplace", folder, "--json")
    assert code == 0, err
    assert json.loads(out)["scores"]["laplace, draws"]["nll"] == rows["laplace, draws"]["nll"]
    with RunFolder(folder.with_name("busy")).locked():
        code, _, err = run("laplace", folder, "--out", folder.with_name("busy"))
    assert code == 2
    assert "is in use by process" in err


@pytest.mark.filterwarnings("ignore:the network is not at a maximum")
def test_a_regression_keeps_its_noise(run, tmp_path: Path) -> None:
    folder = trained(tmp_path / "curve", data="bbb-curve", examples=0)
    code, out, err = run(
        "laplace", folder, "--out", tmp_path / "new", "--structure", "full", "--no-evidence",
        "--prior", "2", "--samples", "64", "--json",
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads(out)["scores"]
    assert {"rmse", "nll", "coverage90", "auroc_ood"} <= rows["laplace, linearised"].keys()
    old, new = TrainedRun(folder), TrainedRun(tmp_path / "new")
    assert torch.equal(old.likelihood().std, new.likelihood().std)
    assert new.experiment.options["prior"] == 2
    assert rows["laplace, draws"]["nll"] == pytest.approx(
        rows["laplace, linearised"]["nll"], abs=0.1
    )


@pytest.mark.filterwarnings("ignore:the network is not at a maximum")
def test_a_precision_that_training_chose_is_the_prior(run, tmp_path: Path) -> None:
    folder = trained(
        tmp_path / "chosen",
        model="mlp",
        model_options={"hidden": [16]},
        options={"evidence_every": 1},
    )
    code, _, err = run("laplace", folder, "--no-evidence", "--curvature", "empirical")
    assert code == 0, err
    chosen = RunFolder(folder).read_metrics()[-1]["prior_precision"]
    options = TrainedRun(tmp_path / "chosen-laplace").experiment.options
    assert options["prior"] == chosen != 1
    assert options["curvature"] == "empirical"
    assert run("report", tmp_path / "chosen-laplace")[0] == 0
    page = (tmp_path / "chosen-laplace" / "report.html").read_text("utf-8")
    assert "empirical Fisher" in page


@pytest.mark.filterwarnings("default:the network is not at a maximum")
def test_what_is_refused_leaves_nothing_and_warnings_are_sentences(run, tmp_path: Path) -> None:
    folder = trained(tmp_path / "digits", model_options={"hidden": [16]}, model="mlp", epochs=1)
    for refused in (["--structure", "kroneker"], ["--subset", "nothing"], ["--curvature", "hess"]):
        code, _, err = run("laplace", folder, *refused)
        assert code == 2, err
        assert not (tmp_path / "digits-laplace").exists()
    code, out, err = run("laplace", folder)
    assert code == 0, err
    assert "warning: the network is not at a maximum of the posterior" in out
    assert "UserWarning" not in out + err


def test_other_runs_are_refused_in_a_sentence(run, tmp_path: Path) -> None:
    folder = trained(tmp_path / "many", method="ensemble", options={"members": 2}, epochs=1)
    code, _, err = run("laplace", folder)
    assert code == 2
    assert "has a Samples posterior: Laplace takes a run with one network" in err
    (folder / "posterior.safetensors").unlink()
    code, _, err = run("laplace", folder)
    assert code == 2
    assert "has no posterior yet: start the run again with --resume" in err
    assert run("laplace", tmp_path / "nothing")[0] == 2
