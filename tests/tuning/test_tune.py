"""`tune` on networks, from Python and from the command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import torchbayes as tb
from torchbayes.cli import app, main
from torchbayes.core.errors import RunError
from torchbayes.core.locks import lock_file
from torchbayes.core.reading import read_toml
from torchbayes.train.loop import Training
from torchbayes.tuning.search import Search

torch.manual_seed(0)
X = torch.randn(240, 2)
Y = (X[:, 0] > 0).long()


def tune(**arguments):
    settings = {"epochs": 3, "batch_size": 40, "progress": False, "trials": 4, **arguments}
    return tb.tune(nn.Linear(2, 2), (X, Y), "map", **settings)


def test_the_score_is_the_nll_of_the_held_out_examples():
    """Every trial, repeated by hand."""
    torch.manual_seed(1)
    net = nn.Linear(2, 2)
    found = tb.tune(net, (X, Y), "map", trials=3, epochs=3, seed=3, progress=False)
    order = torch.randperm(240, generator=torch.Generator().manual_seed(3))
    held, rest = order[:48], order[48:]
    for trial in found.trials:
        run = tb.fit(
            net, (X[rest], Y[rest]), "map", epochs=3, seed=3, progress=False, **trial.options
        )
        with torch.no_grad():
            wanted = nn.functional.cross_entropy(run.model(X[held]), Y[held])
        assert trial.nll == pytest.approx(float(wanted), rel=1e-5)
    assert found.nll == min(t.nll for t in found.trials if t.nll is not None)


def test_what_cannot_be_searched_is_one_sentence():
    with pytest.raises(ValueError, match="has no option 'momentun'"):
        tune(space={"momentun": (0.1, 0.9)})
    with pytest.raises(ValueError, match="lr is both given and in the space"):
        tune(space={"lr": (0.1, 0.9)}, lr=0.1)
    with pytest.raises(ValueError, match=r"validation is 1\.5"):
        tune(validation=1.5)
    loader = DataLoader(TensorDataset(X, Y), 40)
    with pytest.raises(ValueError, match="a DataLoader cannot be divided: pass held-out data"):
        tb.tune(nn.Linear(2, 2), loader, trials=1)
    found = tb.tune(nn.Linear(2, 2), loader, validation=(X, Y), trials=2, epochs=1, progress=False)
    assert len(found.trials) == 2
    with pytest.raises(ValueError, match="trials is 0"):
        tune(trials=0)


def test_warnings_of_bad_settings_are_notes(capsys):
    """Those of the defaults are warnings, as ever."""
    found = tune(space={"lr": (500.0, 900.0)}, trials=2, epochs=20, progress=True)
    assert found.default_nll is not None
    said = " ".join(capsys.readouterr().err.split())
    assert "training goes back to the beginning of epoch 1" in said
    with pytest.warns(UserWarning, match="do not trust|broken down|goes back"):
        tune(lr=700.0, space={"prior": (0.5, 2.0)}, trials=1, epochs=20)


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


BASE = ("--data", "moons", "--epochs", 2, "--model-set", "hidden=[8]")


def test_the_command_writes_a_recipe_that_train_and_compare_take(tmp_path):
    out = tmp_path / "search"
    shown = run("tune", *BASE, "--method", "swag", "--trials", 3, "--space", "lr=0.001:0.1",
                "--space", "rank=[2,4]", "--out", out, "--json")  # fmt: skip
    told = json.loads(shown.stdout)
    assert len(told["trials"]) == 3
    recipe = read_toml(out / "recipe.toml")
    assert recipe["method"] == "swag"
    assert recipe["options"] == told["best"]
    assert recipe["methods"] == {"swag": told["best"]}
    assert "validation" not in recipe  # what was held out is trained on again
    run("train", "--recipe", out / "recipe.toml", "--out", tmp_path / "run")
    config = read_toml(tmp_path / "run" / "config.toml")
    assert {name: config["options"][name] for name in told["best"]} == told["best"]
    run("compare", "--recipe", out / "recipe.toml", "--out", tmp_path / "table")
    results = json.loads((tmp_path / "table" / "results.json").read_text())
    assert list(results["methods"]) == ["swag"]

    with pytest.raises(ValueError, match="already holds a search"):
        run("tune", *BASE, "--method", "swag", "--trials", 3, "--out", out)
    more = run("tune", *BASE, "--method", "swag", "--trials", 4, "--space", "lr=0.001:0.1",
               "--space", "rank=[2,4]", "--out", out, "--resume", "--json")  # fmt: skip
    assert json.loads(more.stdout)["trials"][:3] == told["trials"]
    with pytest.raises(ValueError, match="neither a range"):
        run("tune", *BASE, "--space", "lr=0.1", "--out", tmp_path / "other")


SMALL = ["--data", "moons", "--batch-size", "500", "--epochs", "1", "--samples", "2"]


@pytest.mark.parametrize("hopeless", [False, True])
def test_what_another_process_has_left_is_done_again(
    hopeless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the other process, which dies in its trial after this one has done all of its own."""
    held: list[int] = []
    original = Search._attempt

    def attempt(self: Search, *rest: Any) -> None:
        if not held:
            held.append(self._open(self._study.ask().number))
            lock_file(held[0])
        original(self, *rest)

    class Dies:
        returncode: int | None = None

        def __init__(self, command: list[str], **_: Any) -> None:
            assert command[-1] == "--worker"

        def wait(self) -> None:
            if self.returncode is None:
                self.returncode = -9
                os.close(held[0])
                if hopeless:
                    monkeypatch.setattr(Search, "run", lambda self, *_: self.result())

        def terminate(self) -> None:
            pass

    monkeypatch.setattr("subprocess.Popen", Dies)
    monkeypatch.setattr(Search, "_attempt", attempt)
    words = ["tune", *SMALL, "--trials", "2", "--processes", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "--json"])
    if hopeless:
        assert done.exit_code != 0
        assert "only 1 of 2 trials have ended: start it again with --resume" in str(done.exception)
        return
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["trials"]) == 2


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["tune", *SMALL, "--trials", "2", "--out"], "finished trials are kept in"),
        (["continual", "--data", "digits", "--tasks", "split", "--hidden", "8", "--epochs", "1", "--out"],
         "finished tasks are kept in"),
    ],
)  # fmt: skip
def test_ctrl_c_says_what_is_kept(
    words: list[str], kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    original = Training._update

    def update(self: Training, *batch: Any) -> None:
        original(self, *batch)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Training, "_update", update)
    monkeypatch.setattr("sys.argv", ["torchbayes", *words, str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    said = capsys.readouterr().err
    assert f"torchbayes: stopped by SIGINT; {kept} {tmp_path}: start it again with --resume" in said
    assert "nothing was saved" not in said


def test_compare_gives_every_method_the_same_trials(tmp_path):
    out = tmp_path / "table"
    run("compare", *BASE, "--methods", "map,swag", "--tune", 2, "--out", out)
    results = json.loads((out / "results.json").read_text())
    assert set(results["methods"]) == {"map", "swag"}
    for name in ("map", "swag"):
        assert (out / "tuning" / name / "study.db").exists()
    run("compare", *BASE, "--methods", "map,swag", "--tune", 2, "--out", out, "--resume")


def test_a_search_on_other_data_or_from_other_weights_is_refused(tmp_path):
    table, start = tmp_path / "table.csv", tmp_path / "start.safetensors"
    text = "a,b\n" + "".join(f"{number},{number % 7}.5\n" for number in range(40))
    table.write_text(text)
    words = ("tune", "--data", f"table:{table}", "--epochs", 1, "--model-set", "hidden=[8]", "--trials", 1,
             "--method", "map", "--out", tmp_path / "search", "--resume", "--init", start)  # fmt: skip
    net = tb.models.build_model("mlp", input_shape=(1,), num_classes=1, hidden=[8])
    tb.Point(tb.snapshot(net)).save(start)
    first = run(*words, "--json").stdout
    assert run(*words, "--json").stdout == first
    tb.Point({name: weight + 1 for name, weight in tb.snapshot(net).items()}).save(start)
    with pytest.raises(RunError, match="holds a search with init_checksum"):
        run(*words)
    tb.Point(tb.snapshot(net)).save(start)
    table.write_text(text + "40,3.5\n")
    with pytest.raises(RunError, match="holds a search with table_sha256"):
        run(*words)


def test_a_search_in_memory_is_of_its_data(tmp_path):
    common = {"space": {"lr": (1e-3, 1.0)}, "trials": 1, "folder": tmp_path, "resume": True}
    assert tune(**common).nll == tune(**common).nll
    with pytest.raises(RunError, match="holds a search with data_checksum"):
        tb.tune(
            nn.Linear(2, 2), (X + 1, Y), "map", epochs=3, batch_size=40, progress=False, **common
        )
