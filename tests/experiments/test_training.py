"""Training by settings: what it costs does not depend on what the process did before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.training import train_experiment

PEAKS = """
import json, sys
from pathlib import Path
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.training import train_experiment

peaks = {}
for method in ("map", "mle"):
    experiment = Experiment(method=method, epochs=2)
    folder = Path(sys.argv[1]) / method
    train_experiment(experiment, folder, data=experiment.load_data(None), progress=False)
    file = folder / "cost.json"
    peaks[method] = json.loads(file.read_text())["peak_memory"] if file.exists() else None
print(json.dumps(peaks))
"""


def test_the_first_run_of_a_process_takes_no_more_memory_than_the_second(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    peaks = json.loads(done.stdout)
    if None in peaks.values():
        pytest.skip("this system does not tell a process its peak")
    # The same network and optimiser; without a warm-up, the first of them takes 7 MB more.
    assert abs(peaks["map"] - peaks["mle"]) < 2e6


def test_the_warm_up_leaves_no_trace(tmp_path: Path) -> None:
    """`fit` makes the network and the noise level anew, and the caller's random numbers go on."""
    experiment = Experiment(data="bbb-curve", epochs=1, model_options={"hidden": [4]})
    data = experiment.load_data(None)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run = train_experiment(experiment, tmp_path / "run", data=data, progress=False)
    assert torch.equal(torch.rand(3), expected)
    assert len(run.history) == 1
    again = train_experiment(experiment, tmp_path / "again", data=data, progress=False)
    for name, value in run.posterior.mean().items():
        assert torch.equal(value, again.posterior.mean()[name])


def test_the_warm_up_says_nothing_of_batch_norm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes a sampler's step, but the run's method does not sample."""
    options = {"width": 2}
    experiment = Experiment(model="fastnet", model_options=options, examples=64, epochs=1)
    data = experiment.load_data(None)
    train_experiment(experiment, tmp_path / "run", data=data, progress=False)
    assert "batch norm" not in caplog.text
