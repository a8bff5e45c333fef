"""One run in a folder at a time, and what `--resume` compares, keeps and repairs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import torchbayes as tb
from torchbayes.core.errors import FileError, RunError, WriteError
from torchbayes.core.reading import toml_text
from torchbayes.train.progress import NoProgress
from torchbayes.train.registry import method_options
from torchbayes.train.run_folder import RunFolder

from ..conformance.problems import blobs, small_net
from ..stopping import StopAfter, Stopped

SETTINGS: dict[str, Any] = {"method": "map", "epochs": 3, "batch_size": 24}


def fit(folder: Path, **more: Any) -> tb.Run:
    return tb.fit(small_net, blobs(), folder=folder, **{**SETTINGS, "progress": False, **more})


def test_a_second_run_is_refused_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    refusals: list[str] = []

    class Intruder(NoProgress):
        def advance(self, loss: float) -> None:
            before = {f.name: f.read_bytes() for f in (tmp_path / "run").iterdir()}
            for resume in (True, False):
                with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
                    fit(tmp_path / "run", resume=resume)
                refusals.append("in use")
            assert {f.name: f.read_bytes() for f in (tmp_path / "run").iterdir()} == before

    run = fit(tmp_path / "run", progress=Intruder(), checkpoint_seconds=0.0, epochs=1)
    alone = fit(tmp_path / "alone", epochs=1)
    assert len(refusals) == 2 * 10
    for name, tensor in alone.posterior.mean().items():
        assert torch.equal(tensor, run.posterior.mean()[name])


def test_nothing_of_before_the_first_checkpoint_is_kept(tmp_path: Path) -> None:
    """As if a kill had come before the first checkpoint, and rows of another session were there."""
    files = RunFolder(tmp_path / "run")
    fit(tmp_path / "run")
    for file in (files.checkpoint.newest, files.checkpoint.previous, files.posterior_file):
        file.unlink()
    files.append_metrics({"epoch": 4, "loss": 1.0})
    run = fit(tmp_path / "run", resume=True)
    assert files.read_metrics() == run.history
    assert len(run.history) == 3


def test_traces_that_a_kill_has_left_out_come_from_the_checkpoint(tmp_path: Path) -> None:
    """As if a kill had come between the last checkpoint and what is written after it."""
    fit(tmp_path, method="sgld")
    files = RunFolder(tmp_path)
    rows = files.read_traces()
    files.traces_file.unlink()
    files.posterior_file.unlink()
    fit(tmp_path, method="sgld", resume=True)
    assert rows
    assert files.read_traces() == rows


@pytest.mark.parametrize("damage", ["short", "digit", "gone", "garbage"])
def test_a_damaged_metrics_file_is_named_and_resume_writes_it_anew(
    tmp_path: Path, damage: str
) -> None:
    history = fit(tmp_path).history
    files = RunFolder(tmp_path)
    text = files.metrics_file.read_text()
    place = text.index("loss") + 9
    changed = {
        "short": "".join(text.splitlines(keepends=True)[:2]),
        "digit": text[:place] + ("1" if text[place] != "1" else "2") + text[place + 1 :],
        "gone": "",
        "garbage": "{}}\n" + text,
    }[damage]
    files.metrics_file.write_text(changed)
    with pytest.raises(FileError, match="with resume=True, which writes it anew") as error:
        files.read_metrics()
    assert "metrics.jsonl" in str(error.value)
    fit(tmp_path, resume=True)
    assert files.read_metrics() == history


def test_a_setting_that_did_not_exist_then_had_its_default(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        fit(tmp_path, progress=StopAfter(3), checkpoint_seconds=0.0)
    files = RunFolder(tmp_path)
    text = files.config_file.read_text()
    older = "".join(
        line for line in text.splitlines(keepends=True)
        if not line.startswith(("accumulate", "warmup", "torchbayes", "#"))
    )  # fmt: skip
    assert older.count("\n") < text.count("\n") - 2
    files.config_file.write_text(toml_text(older))
    with pytest.raises(RunError, match="holds a run with accumulate = 1, not 2"):
        fit(tmp_path, resume=True, accumulate=2)
    with pytest.raises(RunError, match=r"clip_norm = None, not 1\.0"):
        fit(tmp_path, resume=True, clip_norm=1.0)
    with pytest.raises(RunError, match=r"params = None, not \['0.weight'\]"):
        fit(tmp_path, resume=True, params="0.weight")
    with pytest.raises(RunError, match="output = None, not 'clone'"):
        fit(tmp_path, resume=True, output=torch.clone)
    with pytest.raises(RunError, match="init_checksum = None, not '"):
        fit(tmp_path, resume=True, init=small_net())
    assert len(fit(tmp_path, resume=True).history) == 3


CLASSES = (torch.randn(20, 2), torch.arange(20) % 2)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", ["posterior.safetensors", "checkpoint-previous.safetensors"])
def test_a_run_without_its_settings_is_refused(tmp_path: Path, left: str, resume: bool) -> None:
    fit(tmp_path)
    (tmp_path / "config.toml").unlink()
    for file in tmp_path.glob("*.safetensors"):
        if file.name != left:
            file.unlink()
    with pytest.raises(
        RunError, match=f"has a {left} but no config.toml, .*: restore config.toml, or remove"
    ):
        fit(tmp_path, resume=resume)


def _net(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 4), *layers, torch.nn.Linear(4, 2))


def _seen(x: torch.Tensor, y: torch.Tensor, form: str) -> Any:
    if form == "pair":
        return x, y
    data = torch.utils.data.TensorDataset(x, y)
    return data if form == "data set" else torch.utils.data.DataLoader(data, batch_size=5)


@pytest.mark.parametrize("form", ["pair", "data set", "loader"])
def test_other_data_are_refused_and_the_same_ones_are_not(tmp_path: Path, form: str) -> None:
    x, y = CLASSES
    common: dict[str, Any] = {"folder": tmp_path, "epochs": 1, "progress": False, "resume": True}
    first = tb.fit(_net(), _seen(x, y, form), **common)
    assert tb.fit(_net(), _seen(x.clone(), y, form), **common).history == first.history
    said = r"holds a run with other data \(data_checksum = '\w+', not '\w+'\): resume it with its own or"
    for inputs, targets in ((x + 1, y), (x, 1 - y), (x.double(), y)):
        with pytest.raises(RunError, match=said):
            tb.fit(_net().to(inputs.dtype), _seen(inputs, targets, form), **common)


class _Points:  # prints its address
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class _OfPoints(torch.nn.Linear):
    def forward(self, points: _Points) -> torch.Tensor:  # type: ignore[override]
        return super().forward(points.x)


def test_what_inputs_of_another_class_print_is_not_their_content(tmp_path: Path) -> None:
    x, y = CLASSES
    common: dict[str, Any] = {
        "folder": tmp_path, "epochs": 1, "progress": False, "resume": True, "split": False,
    }  # fmt: skip
    first = tb.fit(_OfPoints(2, 2), (_Points(x), y), **common)
    kept = _Points(x)  # so that the next has another address
    assert tb.fit(_OfPoints(2, 2), (_Points(kept.x), y), **common).history == first.history


def test_another_network_of_the_same_class_is_refused(tmp_path: Path) -> None:
    common: dict[str, Any] = {"folder": tmp_path, "epochs": 1, "progress": False, "resume": True}
    tb.fit(_net(torch.nn.ReLU()), CLASSES, **common)
    said = "holds a run with another network"
    with pytest.raises(RunError, match=said):  # its weights have the same names and shapes
        tb.fit(_net(torch.nn.Tanh()), CLASSES, **common)
    frozen = _net(torch.nn.ReLU())
    next(frozen.parameters()).requires_grad_(False)
    with pytest.raises(RunError, match=said):
        tb.fit(frozen, CLASSES, **common)
    # Another torch may print the same layer otherwise.
    files = RunFolder(tmp_path)
    files.write_config({**files.read_config(), "torch": "0"})
    tb.fit(_net(torch.nn.Tanh()), CLASSES, **common)


def test_another_likelihood_is_refused_and_a_learned_level_is_none(tmp_path: Path) -> None:
    x, y = torch.randn(20, 2), torch.randn(20, 2)

    def resumed(name: str, likelihood: Any, targets: torch.Tensor = y) -> tb.Run:
        return tb.fit(
            _net(), (x, targets), folder=tmp_path / name, likelihood=likelihood, epochs=1, resume=True,
            progress=False,
        )  # fmt: skip

    resumed("fixed", tb.GaussianNoise(0.1))
    resumed("fixed", tb.GaussianNoise(0.1))
    for other in (
        tb.GaussianNoise(5.0),
        tb.GaussianNoise(0.1, learned=True),
        tb.StudentT(scale=0.1),
    ):
        with pytest.raises(
            RunError, match=r"holds a run with likelihood = .*'GaussianNoise'.*, not "
        ):
            resumed("fixed", other)
    learned = resumed("learned", tb.GaussianNoise(learned=True)).likelihood
    resumed("learned", learned)
    resumed("weighted", tb.Categorical(class_weight=torch.tensor([1.0, 2.0])), CLASSES[1])
    with pytest.raises(RunError, match="holds a run with likelihood"):
        resumed("weighted", tb.Categorical(class_weight=torch.tensor([1.0, 3.0])), CLASSES[1])

    def narrow(outputs: torch.Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(outputs, 0.1)

    def wide(outputs: torch.Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(outputs, 1.0)

    resumed("function", narrow)
    with pytest.raises(RunError, match=r"'function': 'narrow'}, not .*'wide'"):
        resumed("function", wide)


def test_a_run_of_a_version_without_digests_goes_on(tmp_path: Path) -> None:
    fit(tmp_path)
    config = RunFolder(tmp_path).read_config()
    for key in ("data_checksum", "network_checksum", "likelihood"):
        del config[key]
    RunFolder(tmp_path).write_config(config)
    fit(tmp_path, resume=True)


def test_another_version_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Stopped):
        fit(tmp_path, progress=StopAfter(3))
    files = RunFolder(tmp_path)
    files.write_config({**files.read_config(), "torchbayes": "0.0.1"})
    fit(tmp_path, resume=True)
    assert "was begun by torchbayes 0.0.1 and goes on with" in caplog.text


def test_a_folder_that_is_removed_in_mid_training(tmp_path: Path) -> None:
    class Removed(NoProgress):
        def advance(self, loss: float) -> None:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    with pytest.raises(WriteError, match="do not remove a folder that is being written to"):
        fit(tmp_path / "run", progress=Removed(), checkpoint_seconds=0.0)


def test_the_identity_is_of_settings_and_version(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    found = set()
    for config in ({"epochs": 1}, {"epochs": 2}, {"epochs": 1, "torchbayes": "9"}):
        files.write_config(config)
        found.add(files.identity())
    assert len(found) == 3
    assert json.loads(json.dumps(files.read_config())) == {"epochs": 1, "torchbayes": "9"}


def test_a_run_goes_on_with_the_defaults_of_the_version_that_began_it(tmp_path: Path) -> None:
    """As if that version's default of `members` was another."""
    with pytest.raises(Stopped):
        fit(tmp_path, method="ensemble", progress=StopAfter(12), checkpoint_seconds=0.0)
    files = RunFolder(tmp_path)
    config = files.read_config()
    assert config["defaults"].keys() == method_options(tb.METHODS["ensemble"]).keys()
    assert config["defaults"]["members"] == "None"
    assert config["options"] == {}
    files.write_config(config | {"defaults": config["defaults"] | {"members": 2}})
    run = fit(tmp_path, method="ensemble", resume=True)
    assert len(run.posterior) == 2
    assert run.settings["defaults"]["members"] == 2
    # What is given counts, and a folder of before has none.
    files.write_config({key: value for key, value in config.items() if key != "defaults"})
    assert len(fit(tmp_path, method="ensemble", resume=True).posterior) >= 2
