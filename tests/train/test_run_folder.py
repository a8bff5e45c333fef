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
