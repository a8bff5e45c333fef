"""Rows of a comparison with settings of their own, and the last sample of a chain as a row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torchbayes as tb
from torchbayes.core.reading import read_json
from torchbayes.data import DataSet, OutOfDistribution, Split, load_data
from torchbayes.experiments import compare, evaluation
from torchbayes.experiments import settings as experiment_settings
from torchbayes.experiments.compare import Comparison, rows_from
from torchbayes.experiments.evaluation import evaluate
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment
from torchbayes.report import load_results, write_report
from torchbayes.train.progress import NoProgress
from torchbayes.train.run_folder import RunError, RunFolder

SHARED = {"epochs": 2, "examples": 300, "model": "mlp", "model_options": {"hidden": [16]}}
TABLES = {
    "plain": {"method": "map", "epochs": 1},
    "wide": {"method": "map", "model_options": {"hidden": [32]}},
    "chain": {"method": "sgld", "options": {"samples": 3, "chains": 1}},
    "one": {"last_of": "chain"},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    rows = rows_from(TABLES, SHARED, {}, {"plain": {"lr": 0.01}})
    base = Experiment.from_settings(SHARED, "test")
    Comparison(base, rows, [0, 1], folder).run(lambda *_: NoProgress(), lambda *_: None)
    return folder


def test_every_row_has_its_own_settings(out: Path) -> None:
    table = json.loads((out / "results.json").read_text())["methods"]
    assert list(table) == list(TABLES)
    assert table["plain"]["settings"] == {"epochs": 1, "options": {"lr": 0.01}}
    assert table["wide"]["parameters"] > table["plain"]["parameters"]
    config = RunFolder(out / "runs" / "plain-1").read_config()
    assert (config["seed"], config["epochs"], config["train_size"]) == (1, 1, 300)


def test_a_row_starts_from_the_run_of_another_with_the_same_seed(tmp_path: Path) -> None:
    tables = {
        "base": {"method": "map"},
        "more": {"method": "map", "epochs": 1, "init": "row:base", "options": {"lr": 1e-9}},
    }
    rows = rows_from(tables, SHARED, {}, {})
    base = Experiment.from_settings(SHARED, "test")
    comparison = Comparison(base, rows, [0, 1], tmp_path)
    comparison.run(lambda *_: NoProgress(), lambda *_: None)
    assert not comparison.failed
    for seed in (0, 1):
        first, then = (
            TrainedRun(tmp_path / "runs" / f"{row}-{seed}").posterior().mean() for row in tables
        )
        for name in first:
            torch.testing.assert_close(then[name], first[name], atol=1e-6, rtol=0)
    own = json.loads((tmp_path / "results.json").read_text())["methods"]["more"]["settings"]
    assert own["init"] == "row:base"  # no path of this machine
    Comparison(base, rows, [0, 1], tmp_path).run(lambda *_: NoProgress(), lambda *_: None)
    moved = tmp_path.rename(tmp_path.with_name("moved"))  # the same weights under another path
    Comparison(base, rows, [0, 1], moved).run(lambda *_: NoProgress(), lambda *_: None)
    (moved / "runs" / "base-0" / "posterior.safetensors").rename(tmp_path.with_name("spare"))
    tb.Point(TrainedRun(moved / "runs" / "base-1").posterior().mean()).save(
        moved / "runs" / "base-0" / "posterior.safetensors"
    )
    with pytest.raises(RunError, match="init_checksum"):
        Comparison(base, rows, [0, 1], moved).run(lambda *_: NoProgress(), lambda *_: None)


def test_a_folder_that_cannot_be_made_ends_the_comparison(tmp_path: Path) -> None:
    """It is no failure of the method, of which a comparison would only take note."""
    (tmp_path / "runs").write_text("a file where the runs' folder should be")
    base = Experiment.from_settings(SHARED, "test")
    comparison = Comparison(
        base, rows_from({"a": {"method": "map"}}, SHARED, {}, {}), [0], tmp_path
    )
    with pytest.raises((RunError, OSError), match="runs"):
        comparison.run(lambda *_: NoProgress(), lambda *_: None)
    assert not comparison.failed


def test_a_search_has_no_run_of_another_row_to_start_from(tmp_path: Path) -> None:
    from torchbayes.cli.compare import _tuned

    tables = {"base": {"method": "map"}, "more": {"method": "map", "init": "row:base"}}
    with pytest.raises(ValueError, match=r"'more' starts from another row's run.*leave out --tune"):
        _tuned(rows_from(tables, SHARED, {}, {}), 2, tmp_path, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", ["plane", "later", "one"])
def test_a_row_to_start_from_stands_above_and_has_a_run(start: str) -> None:
    tables = {
        "chain": {"method": "sgld"},
        "one": {"last_of": "chain"},
        "more": {"method": "map", "init": f"row:{start}"},
        "later": {"method": "map"},
    }
    with pytest.raises(ValueError, match=f"'more' has init 'row:{start}'.*a row above"):
        rows_from(tables, {}, {}, {})


def test_the_last_sample_is_scored_alone(out: Path) -> None:
    folder = out / "runs" / "chain-0"
    run = TrainedRun(folder)
    weights = run.posterior()[-1]
    one = Predictions.load(folder / "last" / "predictions.npz")
    whole = Predictions.load(folder / "predictions.npz")
    assert (one.draws, whole.draws) == (1, 3)
    images = run.data.test.inputs.float() / (1 if run.data.test.inputs.is_floating_point() else 255)
    shape = (1, -1, 1, 1)
    images = (images - torch.tensor(run.data.mean).view(shape)) / torch.tensor(run.data.std).view(
        shape
    )
    expected = torch.func.functional_call(run.model.eval(), weights, (images,)).softmax(1)
    torch.testing.assert_close(one.probs, expected, atol=1e-5, rtol=1e-4)
    results = load_results(out)
    single = results.find("one")
    assert single is not None
    assert "last sample of chain" in single.summary
    assert single.predictions is not None
    assert "one" in write_report(out).read_text()


def test_a_posterior_without_samples_has_no_last_one(out: Path) -> None:
    with pytest.raises(ValueError, match="no last sample"):
        evaluate(TrainedRun(out / "runs" / "plain-0"), last=True)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"one": {"last_of": "none"}}, "names a row above"),
        ({"a": {"data": "moons"}}, "all rows of a comparison share: set it above"),
        ({"a": {"epocs": 1}}, "did you mean 'epochs'"),
        ({"a": 1}, "rows.a is 1: expected a table"),
        (7, "rows is 7: expected a table"),
    ],
)
def test_bad_rows_are_named(tables: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_from(tables, SHARED, {}, {})


def plan(folder: Path, methods: list[str], **settings: object) -> Comparison:
    shared = {**SHARED, "epochs": 1, **settings}
    rows = rows_from({name: {"method": name} for name in methods}, shared, {}, {})
    return Comparison(Experiment.from_settings(shared, "test"), rows, [0, 1], folder)


def test_data_is_loaded_once_and_drawn_anew_for_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    trained: dict[tuple[str, int], set[tuple[float, ...]]] = {}
    calibrated: dict[tuple[str, int], set[tuple[float, ...]]] = {}

    def rows_of(split: Split) -> set[tuple[float, ...]]:
        return {tuple(row) for row in split.inputs.flatten(1).tolist()}

    def load(name: str, **options: Any) -> DataSet:
        loads.append(name)
        return load_data(name, **options)

    def train(experiment: Experiment, *arguments: Any, data: DataSet, **options: Any) -> Any:
        trained[experiment.method, experiment.seed] = rows_of(data.train)
        return train_experiment(experiment, *arguments, data=data, **options)

    def calibrate(run: TrainedRun) -> None:
        calibrated[run.experiment.method, run.experiment.seed] = rows_of(run.data.validation)

    monkeypatch.setattr(experiment_settings, "load_data", load)
    monkeypatch.setattr(compare, "train_experiment", train)
    monkeypatch.setattr(compare, "calibrate", calibrate)
    plan(tmp_path, ["map", "mle"], validation=0.2).run(lambda *_: NoProgress(), lambda *_: None)
    assert loads == ["digits"]
    assert trained["map", 0] == trained["mle", 0] != trained["map", 1]
    for run, examples in calibrated.items():
        assert len(examples) > 200
        assert not examples & trained[run]


def test_figures_of_other_settings_are_refused(tmp_path: Path) -> None:
    plan(tmp_path, ["map"]).run(lambda *_: NoProgress(), lambda *_: None)
    before = (tmp_path / "results.json").read_text()
    expected = r"map-0 holds a run with batch_size = 64, not 32: resume it with its own settings or"
    with pytest.raises(RunError, match=expected):
        plan(tmp_path, ["map"], batch_size=32).run(lambda *_: NoProgress(), lambda *_: None)
    assert (tmp_path / "results.json").read_text() == before
    (tmp_path / "runs" / "map-1" / "config.toml").unlink()
    with pytest.raises(RunError, match=r"map-1 has a .*safetensors but no config\.toml"):
        plan(tmp_path, ["map"]).run(lambda *_: NoProgress(), lambda *_: None)


def finish(plan: Comparison) -> dict[str, Any]:
    plan.run(lambda *_: NoProgress(), lambda *_: None)
    return read_json(plan.out / "results.json", "")["methods"]  # type: ignore[no-any-return]


def test_figures_on_other_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data may change under their name, as those of `--data-dir` do."""
    before = finish(plan(tmp_path, ["map"], validation=0.2))
    assert finish(plan(tmp_path, ["map"], validation=0.2)) == before

    def load(name: str, **options: Any) -> DataSet:
        data = load_data(name, **options)
        test = data.test
        assert isinstance(test, Split)
        return replace(data, test=Split(test.inputs, test.targets.roll(1)))

    with monkeypatch.context() as patch:
        patch.setattr(experiment_settings, "load_data", load)
        with pytest.raises(RunError, match=r"map-0 holds a run with other data \(data_checksum = "):
            finish(plan(tmp_path, ["map", "mle"], validation=0.2))
    files = [RunFolder(tmp_path / "runs" / f"map-{seed}") for seed in (0, 1)]
    for there in files:  # from before there was a digest
        config = there.read_config()
        del config["data_checksum"]
        there.write_config(config)
    assert finish(plan(tmp_path, ["map"], validation=0.2))["map"]["nll"] == before["map"]["nll"]


def test_scores_on_other_inputs_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = finish(plan(tmp_path, ["map"]))["map"]["runs"][0]
    partner = OutOfDistribution("digits", torch.zeros(20, 1, 8, 8), "no digits")
    monkeypatch.setattr(compare, "ood_for", lambda *_: partner)
    after = finish(plan(tmp_path, ["map"]))["map"]["runs"][0]
    assert after["auroc_ood"] != before["auroc_ood"]
    assert after["seconds"] == before["seconds"]  # nothing was trained
    made = read_json(tmp_path / "runs" / "map-0" / "scores.json", "")["made_with"]
    assert made["ood"] == f"digits {partner.digest}"
    stamp = (tmp_path / "runs" / "map-0" / "scores.json").stat().st_mtime_ns
    finish(plan(tmp_path, ["map"]))
    assert (tmp_path / "runs" / "map-0" / "scores.json").stat().st_mtime_ns == stamp


def test_runs_of_another_commit_are_kept_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(plan(tmp_path, ["map"]))
    finish(plan(tmp_path, ["map"]))
    assert "commit" not in caplog.text
    monkeypatch.setattr(compare, "commit", lambda: "0123456789ab")
    for seed in (0, 1):
        files = RunFolder(tmp_path / "runs" / f"map-{seed}")
        files.write_config({**files.read_config(), "commit": "ba9876543210"})
    finish(plan(tmp_path, ["map"]))
    assert caplog.text.count("has runs of commit ba9876543210, this is 0123456789ab: their") == 1


def test_scores_of_other_draws_are_made_again(tmp_path: Path) -> None:
    """`torchbayes evaluate --samples 1` in the folder of a run must not change a comparison."""
    before = finish(plan(tmp_path, ["sgld"]))["sgld"]["runs"]
    evaluate(TrainedRun(tmp_path / "runs" / "sgld-0"), samples=1)
    changed = read_json(tmp_path / "runs" / "sgld-0" / "scores.json", "")
    assert changed["nll"] != before[0]["nll"]
    assert finish(plan(tmp_path, ["sgld"]))["sgld"]["runs"] == before


def test_a_kill_between_scores_and_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_run: TrainedRun) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compare, "calibrate", killed)
        with pytest.raises(KeyboardInterrupt):
            finish(plan(tmp_path, ["map"]))
    run = tmp_path / "runs" / "map-0"
    assert (run / "scores.json").exists()
    assert not (run / "calibration.json").exists()
    finish(plan(tmp_path, ["map"]))
    assert (run / "calibration.json").exists()
    stamp = (run / "calibration.json").stat().st_mtime_ns
    finish(plan(tmp_path, ["map"]))
    assert (run / "calibration.json").stat().st_mtime_ns == stamp


def test_a_table_has_figures_of_one_version_and_one_user(tmp_path: Path) -> None:
    finish(plan(tmp_path, ["map"]))
    with RunFolder(tmp_path).locked(), pytest.raises(RunError, match="in use by process"):
        finish(plan(tmp_path, ["map"]))
    files = RunFolder(tmp_path / "runs" / "map-0")
    config = files.read_config()
    older = {key: value for key, value in config.items() if key != "noise_std"}
    files.write_config(older)  # from before that setting
    finish(plan(tmp_path, ["map"]))
    with pytest.raises(RunError, match=r"noise_std = 1\.0, not 2\.0"):
        finish(plan(tmp_path, ["map"], noise_std=2.0))
    files.write_config({**config, "torchbayes": "0.0.1"})
    with pytest.raises(RunError, match=r"was made by torchbayes 0\.0\.1, this is"):
        finish(plan(tmp_path, ["map"]))


def test_corruptions_of_other_draws_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def scores(*_: Any) -> dict[str, Any]:
        made.append(tmp_path)
        return {"clean": {}, "kinds": {}}

    monkeypatch.setattr(evaluation, "corruption_scores", scores)
    corrupted = plan(tmp_path, ["sgld"])
    corrupted.corruptions = True
    finish(corrupted)
    finish(corrupted)
    assert len(made) == 2  # one for each seed
    evaluate(TrainedRun(tmp_path / "runs" / "sgld-0"), samples=1, corruptions=True)
    finish(plan(tmp_path, ["sgld"]))  # makes the scores again, but asks for no corruptions
    assert len(made) == 3
    finish(corrupted)
    assert len(made) == 4
    file = tmp_path / "runs" / "sgld-0" / "corruptions.json"
    assert read_json(file, "")["made_with"]["samples"] == 32


def test_figures_from_another_start_are_refused(tmp_path: Path) -> None:
    """A file of weights may have changed under its name; a comparison without it is another one."""
    file, out = tmp_path / "start.safetensors", tmp_path / "out"
    make = Experiment.from_settings(SHARED, "test").model_factory(load_data("digits"))
    tb.Point(tb.snapshot(make())).save(file)
    before = finish(plan(out, ["map"], init=str(file)))
    assert finish(plan(out, ["map"], init=str(file))) == before
    with pytest.raises(RunError, match=r"map-0 holds a run with init = '.*', not ''"):
        finish(plan(out, ["map"]))
    tb.Point(tb.snapshot(make())).save(file)
    with pytest.raises(RunError, match="map-0 holds a run with init_checksum = "):
        finish(plan(out, ["map"], init=str(file)))


def test_damaged_scores_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = finish(plan(tmp_path, ["map"]))
    file = tmp_path / "runs" / "map-0" / "scores.json"
    text = file.read_text()
    file.write_text(text.replace('"accuracy": 0.', '"accuracy": 1.'))
    assert finish(plan(tmp_path, ["map"])) == before
    assert "scores.json has been damaged" in caplog.text


@pytest.mark.parametrize(
    "name", ["../../../x", "a/b", "..", ".hidden", "", " ", "a\x1b[31m", "a\\b", "x" * 300]
)
def test_rows_that_cannot_name_a_folder(tmp_path: Path, name: str) -> None:
    rows = rows_from({name: {"method": "map"}}, SHARED, {}, {})
    with pytest.raises(ValueError, match="cannot name a folder") as error:
        Comparison(Experiment.from_settings(SHARED, "test"), rows, [0], tmp_path)
    assert "\x1b" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_more_examples_than_there_are(out: Path) -> None:
    with pytest.raises(ValueError, match="examples is 99999"):
        Experiment(examples=99999).load_data(None)
