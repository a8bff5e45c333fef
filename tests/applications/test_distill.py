"""A student that imitates a posterior's predictive, in Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.applications.distill import SoftLabels
from torchbayes.cli import main
from torchbayes.core.errors import RunError
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.training import train_experiment


def test_the_loss_is_the_cross_entropy_to_the_teacher() -> None:
    logits, wanted = torch.randn(7, 4), torch.rand(7, 4).softmax(1)
    expected = -(wanted * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(SoftLabels().loss(logits, wanted), expected)
    with pytest.raises(ValueError, match=r"student gives \(3,\) outputs and the teacher \(4,\)"):
        SoftLabels().loss(torch.zeros(7, 3), wanted)


def test_a_student_learns_what_no_single_draw_says() -> None:
    """Two draws that contradict each other: each is sure, their average is not, and nor is the student."""
    teacher = nn.Linear(1, 2, bias=False)
    samples = tb.Samples(teacher)
    for sign in (1.0, -1.0):
        samples.append({"weight": torch.tensor([[8.0 * sign], [-8.0 * sign]])})
    inputs = torch.linspace(-1, 1, 200).unsqueeze(1)
    student = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
    run = tb.applications.distill(
        student, teacher, samples, inputs, epochs=40, lr=0.01, progress=False
    )
    found = run.predict(inputs)
    assert isinstance(run.posterior, tb.Point)
    torch.testing.assert_close(found.probs, torch.full((200, 2), 0.5), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"copies": 0}, "copies is 0"), ({"noise_std": -1.0}, "noise_std is -1")],
)
def test_bad_numbers_are_named(options: dict[str, float], message: str) -> None:
    net = nn.Linear(1, 2)
    with pytest.raises(ValueError, match=message):
        tb.applications.distill(net, net, tb.Point(tb.snapshot(net)), torch.zeros(3, 1), **options)  # type: ignore[arg-type]


def test_the_command_scores_teacher_and_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {"epochs": 6, "model": "mlp", "model_options": {"hidden": [32]}}
    experiment = Experiment.from_settings(
        {**shared, "method": "sgld", "options": {"chains": 1, "burn_in": 0.4}}, "test"
    )
    run = tmp_path / "run"
    train_experiment(experiment, run, data=experiment.load_data(None), progress=False)
    command = ["torchbayes", "distill", str(run), "--epochs", "15", "--lr", "0.003", "--json"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    rows = json.loads(capsys.readouterr().out)
    assert (rows["teacher"]["networks"], rows["student"]["networks"]) == (30, 1)
    assert rows["student"]["stored"] * 30 == rows["teacher"]["stored"]
    # 450 test images: a standard error of 1.2 points at 93 %.
    assert rows["student"]["accuracy"] > rows["teacher"]["accuracy"] - 0.04
    assert (run / "student" / "posterior.safetensors").exists()
    assert set(json.loads((run / "distill.json").read_text())["student"]) >= {"nll", "ece"}


def test_a_student_of_another_teacher_is_refused(tmp_path: Path) -> None:
    teacher, inputs = nn.Linear(1, 2), torch.linspace(-1, 1, 20).unsqueeze(1)
    weights = tb.snapshot(teacher)

    def student(posterior: tb.Posterior, **more: Any) -> tb.Run:
        return tb.applications.distill(
            lambda: nn.Linear(1, 2), teacher, posterior, more.pop("inputs", inputs),
            **{"epochs": 1, "folder": tmp_path, "resume": True, "progress": False, **more},
        )  # fmt: skip

    point = tb.Point(weights)
    assert student(point).history == student(point).history
    with pytest.raises(RunError, match="holds a run with another teacher"):
        student(tb.Point({name: w + 1 for name, w in weights.items()}))
    with pytest.raises(RunError, match="holds a run with another teacher"):
        student(tb.Gaussian(weights, {name: w.abs() + 0.1 for name, w in weights.items()}))
    with pytest.raises(RunError, match=r"noise_std = 0\.1, not 0\.5"):
        student(point, noise_std=0.5)
    with pytest.raises(RunError, match="samples = 32, not 4"):
        student(point, samples=4)
    with pytest.raises(RunError, match="holds a run with other data"):
        student(point, inputs=inputs + 1)
