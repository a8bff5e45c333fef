"""The command line as a user meets it: exit codes, one-sentence errors, files written."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from sklearn.metrics import log_loss, roc_auc_score

import torchbayes as tb
from torchbayes.cli import app
from torchbayes.core.reading import read_json
from torchbayes.data.transform import Normalise
from torchbayes.experiments.compare import Comparison
from torchbayes.experiments.evaluation import evaluate
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment
from torchbayes.models import MODELS
from torchbayes.train.registry import METHODS

QUICK = ["--model", "mlp", "--model-set", "hidden=[16]", "--epochs", "1"]


def sentence(err: str) -> str:
    """The error as one line, without the progress bars above it."""
    return " ".join(line for line in err.splitlines() if line.startswith("torchbayes:"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small run on digits."""
    folder = tmp_path_factory.mktemp("run")
    experiment = Experiment(epochs=15, model="mlp", model_options={"hidden": [64]})
    train_experiment(experiment, folder, data=experiment.load_data(None), progress=False)
    evaluate(TrainedRun(folder))
    return folder


def test_training_a_part_keeps_the_rest_in_the_folder(run, tmp_path: Path) -> None:
    chosen = ["--method", "ivon", "--set", 'params=["layers.2"]']
    code, out, _ = run("train", *QUICK, *chosen, "--out", tmp_path / "r", "--json")
    assert code == 0
    trained = TrainedRun(tmp_path / "r")
    assert set(trained.posterior().mean()) == {"layers.2.weight", "layers.2.bias"}
    code, again, _ = run("evaluate", tmp_path / "r", "--json")
    assert code == 0
    assert json.loads(again)["accuracy"] == json.loads(out)["accuracy"]
    assert run("train", *QUICK, *chosen, "--out", tmp_path / "r", "--resume")[0] == 0
    code, _, err = run("train", *QUICK, "--set", "params=layer.2", "--out", tmp_path / "s")
    assert code == 2
    assert "params has 'layer.2'" in sentence(err)
    assert "did you mean 'layers.2'" in sentence(err)


def test_train_writes_a_run_folder_and_scores(run, tmp_path: Path) -> None:
    code, out, _ = run("train", *QUICK, "--out", tmp_path / "r", "--json")
    assert code == 0
    scores = json.loads(out)
    assert set(scores) >= {"accuracy", "nll", "ece", "brier", "auroc_misclassification"}
    names = {"config.toml", "metrics.jsonl", "checkpoint.safetensors", "posterior.safetensors"}
    assert names <= {f.name for f in (tmp_path / "r").iterdir()}


def test_a_run_starts_from_the_weights_of_another(run, trained: Path, tmp_path: Path) -> None:
    start = ["--init", trained / "posterior.safetensors", "--setting", "examples=200"]
    words = ["train", "--model", "mlp", "--model-set", "hidden=[64]", "--epochs", "1"]
    code, out, err = run(*words, *start, "--method", "swag", "--out", tmp_path / "r", "--json")
    assert code == 0
    before = json.loads((trained / "scores.json").read_text())["accuracy"]
    assert json.loads(out)["accuracy"] > before - 0.02
    assert "swag starts from posterior.safetensors swag" in " ".join(err.split())
    config = (tmp_path / "r" / "config.toml").read_text()
    assert "init = " in config
    assert "init_checksum = " in config
    words[4] = "hidden=[32]"
    code, _, err = run(*words, *start, "--out", tmp_path / "other")
    assert code == 2
    assert "(64, 64) in init (posterior.safetensors) but (32, 64) in" in sentence(err)
    code, _, err = run(*words, "--init", tmp_path / "no.safetensors", "--out", tmp_path / "none")
    assert code == 2
    assert "no.safetensors', and there is no such file" in sentence(err)


def test_an_ensemble_starts_from_a_file_for_each_member(run, trained: Path, tmp_path: Path) -> None:
    first, second = trained / "posterior.safetensors", tmp_path / "second.safetensors"
    shutil.copyfile(first, second)
    words = ["train", "--model", "mlp", "--model-set", "hidden=[64]", "--epochs", "1"]
    words += ["--init", str(first), "--init", str(second), "--setting", "examples=200"]
    out = tmp_path / "r"
    code, _, err = run(*words, "--method", "ensemble", "--set", "members=2", "--out", out)
    assert code == 0, err
    assert "starts from 2 given networks" in " ".join(err.split())
    assert "second.safetensors" in (out / "config.toml").read_text()
    (out / "scores.json").unlink()
    code, _, err = run(
        *words, "--method", "ensemble", "--set", "members=2", "--out", out, "--resume"
    )
    assert code == 0, err
    assert run("evaluate", out)[0] == 0
    code, _, err = run(*words, "--method", "map", "--out", tmp_path / "map")
    assert code == 2
    assert "init has 2 starting points, but this method trains one network" in sentence(err)


def test_compare_writes_results_and_a_page(run, tmp_path: Path) -> None:
    code, out, err = run(
        "compare", "--data", "digits", "--methods", "map,dropout,ensemble", "--epochs", "3",
        "--seeds", "2", "--set", "ensemble.members=2", "--out", tmp_path / "c",
    )  # fmt: skip
    assert code == 0, err
    results = json.loads((tmp_path / "c" / "results.json").read_text())
    assert list(results["methods"]) == ["map", "dropout", "ensemble"]
    keys = {"accuracy", "nll", "ece", "brier", "auroc_misclassification", "auroc_ood", "seconds"}
    for row in results["methods"].values():
        assert keys <= row.keys()
        assert len(row["runs"]) == 2
        accuracies = [r["accuracy"] for r in row["runs"]]
        assert row["accuracy"] == pytest.approx(np.mean(accuracies))
        assert row["spread"]["accuracy"] == pytest.approx(np.std(accuracies, ddof=1))
    assert "map" in out
    assert "<html" in (tmp_path / "c" / "report.html").read_text()
    # The numbers are scikit-learn's on the saved predictions.
    first = results["methods"]["map"]["runs"][0]
    saved = Predictions.load(tmp_path / "c" / first["folder"] / "predictions.npz")
    probs = saved.probs.double().numpy()
    probs /= probs.sum(1, keepdims=True)
    assert first["nll"] == pytest.approx(log_loss(saved.targets.numpy(), probs), rel=1e-4)
    entropy = torch.cat([saved.test.entropy, saved.ood.entropy]).numpy()
    foreign = np.r_[np.zeros(len(saved.probs)), np.ones(len(saved.ood_probs))]
    assert first["auroc_ood"] == pytest.approx(roc_auc_score(foreign, entropy), abs=1e-6)
    trained = TrainedRun(tmp_path / "c" / first["folder"])
    noise = torch.randint(
        256, (2000, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    blank = trained.predict(
        Normalise(trained.data.mean, trained.data.std)(noise, torch.Generator())
    )
    assert isinstance(blank, tb.ClassPredictive)
    entropy = torch.cat([saved.test.entropy, blank.entropy]).numpy()
    foreign = np.r_[np.zeros(len(saved.probs)), np.ones(2000)]
    assert first["auroc_noise"] == pytest.approx(roc_auc_score(foreign, entropy), abs=1e-6)
    # A second call keeps what is there.
    before = (tmp_path / "c" / "runs" / "map-0" / "checkpoint.safetensors").stat().st_mtime_ns
    assert run("compare", "--data", "digits", "--out", tmp_path / "c")[0] == 2
    code, _, _ = run(
        "compare", "--data", "digits", "--methods", "map,dropout", "--epochs", "3", "--seeds", "2",
        "--out", tmp_path / "c", "--resume",
    )  # fmt: skip
    assert code == 0
    assert (
        tmp_path / "c" / "runs" / "map-0" / "checkpoint.safetensors"
    ).stat().st_mtime_ns == before


def test_map_on_digits_is_at_least_97_percent_accurate(run, tmp_path: Path) -> None:
    code, out, _ = run("compare", "--methods", "map", "--out", tmp_path / "c", "--json")
    assert code == 0
    assert json.loads(out)["methods"]["map"]["accuracy"] >= 0.97


def test_evaluate_repeats_the_scores(run, trained: Path) -> None:
    before = read_json(trained / "scores.json", "")
    assert before.pop("made_with")["samples"] == 32
    code, out, _ = run("evaluate", trained, "--json")
    assert code == 0
    again = json.loads(out)
    assert {k: again[k] for k in before} == before


def test_predict_reads_image_files(run, trained: Path, tmp_path: Path) -> None:
    from torchbayes.data import load_data

    data = load_data("digits")
    files = []
    for i in range(20):
        file = tmp_path / f"{i}.png"
        Image.fromarray((255 * data.test.inputs[i, 0]).byte().numpy()).save(file)
        files.append(file)
    code, out, _ = run("predict", trained, *files, "--json")
    assert code == 0
    rows = json.loads(out)
    right = [row["class"] == str(int(data.test.targets[i])) for i, row in enumerate(rows)]
    assert sum(right) >= 16
    assert all(0 <= row["confidence"] <= 1 for row in rows)


@pytest.mark.parametrize("what", ["methods", "models", "data"])
def test_lists(run, what: str) -> None:
    code, out, _ = run(what, "--json")
    names = [row["name"] for row in json.loads(out)]
    assert code == 0
    expected = {"methods": METHODS, "models": MODELS, "data": ["digits", "cifar10"]}[what]
    assert set(expected) <= set(names)
    assert run(what)[0] == 0


def test_method_options_are_listed(run) -> None:
    code, out, _ = run("methods", "ensemble")
    assert code == 0
    assert "members" in out


def test_recipe_settings_and_flags(run, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'data = "digits"\nmodel = "mlp"\nepochs = 7\nmodel_options = {hidden = [8]}\n'
        "[options]\nlr = 0.01\n[cpu]\nepochs = 2\n[cpu.options]\nprior = 3.0\n"
    )
    out = tmp_path / "run"
    extra = ["--set", "lr=0.02", "--setting", "clip_norm=2"]
    assert run("train", "--recipe", recipe, "--cpu", *extra, "--out", out)[0] == 0
    config = (out / "config.toml").read_text()
    assert "clip_norm = 2.0" in config
    assert "epochs = 2" in config
    assert "lr = 0.02" in config
    assert "prior = 3.0" in config


BAD = {
    "unknown method": (["train", "--method", "ensembel"], "did you mean 'ensemble'"),
    "unknown model": (["train", "--model", "lenet"], "did you mean 'lenet5'"),
    "unknown data": (["train", "--data", "fashion-mnst"], "did you mean 'fashion-mnist'"),
    "negative epochs": (["train", "--epochs", "-3"], "epochs is -3"),
    "unknown option": (["train", "--set", "rl=0.1"], "no option 'rl'"),
    "option of the wrong type": (["train", "--set", "lr=fast"], "expected float"),
    "option without a value": (["train", "--set", "lr"], "not of the form name=value"),
    "unknown model option": (["train", "--model", "mlp", "--model-set", "hiden=[8]"], "hidden"),
    "wrong input shape": (["train", "--data", "moons", "--model", "lenet5"], "lenet5"),
    "unknown schedule": (["train", "--schedule", "cosin"], "schedule is 'cosin'"),
    "unknown setting": (["train", "--setting", "clipnorm=1"], "did you mean 'clip_norm'"),
    "missing recipe": (["train", "--recipe", "nowhere.toml"], "no file nowhere.toml"),
    "no such run": (["evaluate", "nowhere"], "not a run folder"),
    "no such comparison": (["report", "nowhere"], "results.json"),
    "no methods": (["compare", "--methods", ","], "methods is empty"),
    "no seeds": (["compare", "--seeds", "0", "--methods", "map"], "seeds is 0"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_gets_one_sentence_and_exit_code_2(
    case: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[case]
    code, _, err = run(*arguments)
    assert code == 2
    assert message in sentence(err), err
    assert "Traceback" not in err


def test_misspelt_recipe_keys_are_named(run, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    for text, message in {
        'dat = "digits"': "did you mean 'data'",
        "epochs = 'three'": "expected a value such as 30",
        "[cpu]\nepoch = 3": "did you mean 'epochs'",
        "epochs = ": "not valid TOML",
    }.items():
        recipe.write_text(text)
        code, _, err = run("train", "--recipe", recipe)
        assert code == 2
        assert message in sentence(err), err


def test_bad_data_folders(run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "cats").mkdir(parents=True)
    code, _, err = run("train", "--data", f"folder:{empty}", *QUICK)
    assert code == 2
    assert "image" in sentence(err)
    for name in ("cats", "dogs"):
        (empty / name).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(empty / name / "a.png")
    (empty / "dogs" / "b.png").write_bytes(b"not an image")
    code, _, err = run("train", "--data", f"folder:{empty}", *QUICK, "--out", tmp_path / "o")
    assert code == 2
    assert "b.png" in sentence(err)


def test_half_downloaded_data(run, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b half a file")
    for name in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(b"")
    code, _, err = run("train", "--data", "mnist", "--data-dir", tmp_path, *QUICK)
    assert code == 2
    assert "train-images-idx3-ubyte.gz" in sentence(err)


def test_checkpoint_of_another_model(run, tmp_path: Path) -> None:
    out = tmp_path / "r"
    assert run("train", *QUICK, "--out", out)[0] == 0
    code, _, err = run("train", *QUICK, "--model-set", "hidden=[17]", "--out", out, "--resume")
    assert code == 2
    assert "model_options" in sentence(err)
    assert run("train", *QUICK, "--out", out)[0] == 2


def test_unwritable_output(run, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    code, _, err = run("train", *QUICK, "--out", blocked / "r")
    assert code == 2
    assert "choose another output folder" in sentence(err)


def test_a_folder_without_write_permission(run, tmp_path: Path) -> None:
    read_only = tmp_path / "locked"
    read_only.mkdir()
    read_only.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if _can_write(read_only):
        pytest.skip("this user may write anywhere")
    assert run("train", *QUICK, "--out", read_only)[0] == 2


def _can_write(folder: Path) -> bool:
    try:
        (folder / "probe").touch()
    except PermissionError:
        return False
    (folder / "probe").unlink()
    return True


def test_corrupt_image_to_predict(run, trained: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"\x89PNG nothing more")
    code, _, err = run("predict", trained, bad)
    assert code == 2
    assert "bad.png" in sentence(err)
    code, _, err = run("predict", trained, tmp_path / "absent.png")
    assert code == 2
    assert "absent.png" in sentence(err)


def test_damaged_posterior(run, trained: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    file = copy / "posterior.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    code, _, err = run("evaluate", copy)
    assert code == 2
    assert "cut short" in sentence(err)


def test_version_and_help(run) -> None:
    assert tb.__version__ in run("--version")[1]
    text = run("--help")[1]
    for command in ("train", "compare", "recipes", "verify"):
        assert f" {command} " in text
    for action in ("list", "show", "run"):
        assert f" {action} " in run("recipes", "--help")[1]


def params(command: str) -> dict[str, Any]:
    group = typer.main.get_command(app)
    return {p.name: p for p in group.commands[command].params}  # type: ignore[attr-defined]


def test_the_help_shows_the_settings_that_are_used() -> None:
    """An option without a value is the experiment's own default, which the help names."""
    usual = Experiment()
    named = {"data", "method", "epochs", "batch_size", "samples", "seed", "schedule"}
    for command in ("train", "compare"):
        found = {name: p.show_default for name, p in params(command).items()}
        for name in named & found.keys():
            assert found[name] == str(usual.settings()[name]), name
    assert found["augment"] == "no"
    assert not usual.augment
    shown = params("train")
    assert float(shown["validation"].show_default) == usual.validation
    assert int(shown["accumulate"].show_default) == usual.accumulate


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_help_lists_every_schedule_and_its_settings(command: str) -> None:
    text = params(command)["schedule"].help
    with pytest.raises(ValueError, match="expected") as error:
        tb.Schedule("none of them")
    names = re.findall(r"\w+", str(error.value).partition("expected")[2].replace(" or ", " "))
    assert len(names) >= 6
    details = {field.name for field in dataclasses.fields(tb.Schedule)} - {"name"}
    assert {*names, *details} <= set(re.findall(r"\w+", text))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "--lr", "0.1"], "train has no option --lr: "),
        (["compare", "--lr=0.1", "--epochs", "3"], "compare has no option --lr: "),
    ],
)
def test_a_methods_option_as_a_flag_is_pointed_to_set(run, arguments: list[str], hint: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert hint in sentence(err)
    assert "use --set lr=0.1 for an option of the method" in sentence(err)


def test_a_misspelt_flag_gets_the_nearest_one(run) -> None:
    code, _, err = run("train", "--epoch", "3")
    assert code == 2
    assert "--epochs" in err
    assert "--set" not in err
    code, _, err = run("trian")
    assert code == 2
    assert "Did you mean 'train'" in err


def test_the_out_of_distribution_set_is_named(run, trained: Path) -> None:
    from torchbayes.data import load_data, ood_for

    code, out, _ = run("evaluate", trained)
    assert code == 0
    assert f"out of distribution (OOD): {ood_for(load_data('digits')).name}" in out


def test_only_a_bare_compare_is_the_demo(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --data the ordinary defaults apply, for digits as for any other data set."""
    plans: list[Comparison] = []

    def plan_only(plan: Comparison, *_: object) -> None:
        plans.append(plan)
        raise ValueError("planned")

    monkeypatch.setattr(Comparison, "run", plan_only)
    words = ["compare", "--methods", "map,ensemble"]
    for name, more in {"demo": [], "digits": ["--data", "digits"]}.items():
        code, _, err = run(*words, *more, "--out", tmp_path / name)
        assert (code, sentence(err)) == (2, "torchbayes: planned")
    found = [([job.experiment.epochs for job in plan.jobs], plan.corruptions) for plan in plans]
    # The demo's five members have a fifth of the epochs each, so that they cost what one network does.
    assert found == [([40, 8], True), ([30, 30], False)]
