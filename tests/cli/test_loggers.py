"""`--logger` names the tracker of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def test_the_command_line_chooses_a_logger(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for wandb, which records the calls."""
    calls: list[tuple[str, Any]] = []
    theirs = SimpleNamespace(
        id="x", config=SimpleNamespace(update=lambda c, **_: calls.append(("config", c))),
        log=lambda values, step: calls.append(("log", step)),
        log_artifact=lambda a: calls.append(("artifact", a)),
    )  # fmt: skip

    class Artifact:
        def __init__(self, name: str, type: str) -> None:
            calls.append(("made", (name, type)))

        def add_file(self, path: str) -> None:
            calls.append(("file", Path(path).name))

    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return theirs

    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(run=None, init=init, Artifact=Artifact)
    )
    out = tmp_path / "moons"
    base = ["train", "--data", "moons", "--epochs", "2", "--logger"]
    assert run(*base, "wandb", "--out", out)[0] == 0
    kinds = [kind for kind, _ in calls]
    assert kinds == ["init", "config", "log", "log", "made", "file", "artifact"]
    assert calls[0][1] == {"project": "torchbayes", "name": "moons", "dir": str(out)}
    assert calls[1][1]["data"] == "moons"
    assert calls[4][1] == ("posterior-x", "posterior")
    code, _, err = run(*base, "tensorbored", "--out", tmp_path / "c")
    assert code == 2
    assert "--logger is 'tensorbored': expected tensorboard, wandb or mlflow" in err
    pytest.importorskip("tensorboard")
    assert run(*base, "tensorboard", "--out", tmp_path / "b")[0] == 0
    assert list((tmp_path / "b" / "tensorboard").iterdir())
