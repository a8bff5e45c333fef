"""Commands on a finished run compute on the device of `--device`, and find the same as on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchbayes.cli import main
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment

COMMANDS = {
    # what is run, of a run of which method, and the options of its training
    "laplace": ("map", {}),
    "average --times 1,2": ("ivon", {}),
    "calibrate": ("ivon", {}),
    "diagnose --inputs 10": ("sgld", {"samples": 8, "chains": 2}),
    "prune": ("ivon", {}),
    "distill --epochs 1": ("ivon", {}),
}


@pytest.mark.filterwarnings("ignore:the network is not at a maximum")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_computes_where_it_is_told(
    command: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    method, options = COMMANDS[command]
    if command.startswith("diagnose"):
        pytest.importorskip("arviz")
    experiment = Experiment(
        epochs=4, examples=100, method=method, model="mlp", model_options={"hidden": [8]}, samples=2,
        options=options,
    )  # fmt: skip
    train_experiment(
        experiment, tmp_path / "one", data=experiment.load_data(None), progress=False,
        device=torch.device("cpu"),
    )  # fmt: skip
    places: list[torch.device] = []
    call = nn.Linear.forward

    def noted(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        places.append(inputs.device)
        return call(layer, inputs)

    monkeypatch.setattr(nn.Linear, "forward", noted)
    found = []
    for where in ("cpu", str(device)):
        folder = tmp_path / where.replace(":", "-")
        shutil.copytree(tmp_path / "one", folder)
        name, *more = command.split()
        arguments = [name, str(folder), *more, "--device", where, "--json"]
        monkeypatch.setattr("sys.argv", ["torchbayes", *arguments])
        places.clear()
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        assert not stopped.value.code, output.err
        assert set(places) == {torch.device(where)}
        found.append(numbers(json.loads(output.out)))
    if not command.startswith("distill"):  # the student starts from the device's random weights
        assert found[1] == pytest.approx(found[0], abs=0.02)
    assert len(found[1]) == len(found[0]) > 0
    assert TrainedRun(tmp_path / "one").device == torch.device("cpu")


def numbers(found: Any) -> list[float]:
    """All numbers in what a command prints, but how long it took."""
    if isinstance(found, dict):
        found = [value for key, value in found.items() if not key.startswith("seconds")]
    if isinstance(found, list):
        return [number for value in found for number in numbers(value)]
    return [float(found)] if isinstance(found, int | float) else []
