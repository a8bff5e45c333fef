"""`torchbayes diagnose` on runs of several chains, of one chain and of no chain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchbayes.cli import main
from torchbayes.experiments.diagnose_run import diagnosis_of
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment
from torchbayes.train.run_folder import RunFolder

pytest.importorskip("arviz")


def train(folder: Path, **settings: object) -> Path:
    shared = {"epochs": 6, "examples": 200, "model": "mlp", "model_options": {"hidden": [8]}}
    experiment = Experiment.from_settings({**shared, **settings}, "test")
    train_experiment(experiment, folder, data=experiment.load_data(None), progress=False)
    return folder


@pytest.mark.parametrize("side_by_side", [False, True])
def test_several_chains(tmp_path: Path, side_by_side: bool) -> None:
    options = {"chains": 3, "samples": 6, "burn_in": 0.5, "side_by_side": side_by_side}
    run = train(tmp_path / "run", method="atmc", options=options)
    samples = TrainedRun(run).posterior()
    assert sorted(samples.chains) == [0] * 6 + [1] * 6 + [2] * 6
    found = diagnosis_of(run, inputs=20)
    assert (found["chains"], found["draws"]) == (3, 6)
    for name in ("predictions", "log_posterior"):
        assert found[name]["rhat_worst"] > 0.8
        assert 0 < found[name]["ess_least"] <= found[name]["ess_median"] <= 60
    assert list(found["layers"]) == ["fc1", "fc2"] or len(found["layers"]) == 2
    for layer in found["layers"].values():
        assert set(layer) == {"temperature", "thermostat", "update_size"}
        assert 0.1 < layer["temperature"] < 10
    assert (run / "traces.png").read_bytes().startswith(b"\x89PNG")
    rows = RunFolder(run).read_traces()
    assert {row["chain"] for row in rows} == {0, 1, 2}


def test_the_log_posterior_is_that_of_the_formula(tmp_path: Path) -> None:
    from torchbayes.checks.diagnosis import log_posterior
    from torchbayes.prior import GaussianPrior

    run = TrainedRun(
        train(
            tmp_path / "run",
            method="sgld",
            epochs=2,
            options={"samples": 4, "lr": 1e-4, "chains": 1},
        )
    )
    inputs, targets = torch.randn(30, 1, 8, 8), torch.randint(10, (30,))
    found = log_posterior(
        run.model, run.posterior(), inputs, targets,
        prior=GaussianPrior(precision=2.0), train_size=90, temperature=0.5,
    )  # fmt: skip
    weights = run.posterior()[1]
    logits = torch.func.functional_call(run.model, weights, (inputs,)).double()
    likely = torch.distributions.Categorical(logits=logits).log_prob(targets).sum() * 90 / 30 / 0.5
    normal = torch.distributions.Normal(0, torch.tensor(2.0).rsqrt())
    expected = likely + sum(normal.log_prob(w).double().sum() for w in weights.values())
    assert found.shape == (1, 4)
    assert found[0, 1] == pytest.approx(float(expected), rel=1e-5)


def test_one_chain_has_no_rhat_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", method="sgld", epochs=2, options={"samples": 5, "chains": 1})
    monkeypatch.setattr("sys.argv", ["torchbayes", "diagnose", str(run)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert "R-hat needs at least 2 chains and this run has 1" in capsys.readouterr().out


def test_a_run_without_chains_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", method="map", epochs=1)
    monkeypatch.setattr("sys.argv", ["torchbayes", "diagnose", str(run)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "method 'map', which has no chains" in capsys.readouterr().err
