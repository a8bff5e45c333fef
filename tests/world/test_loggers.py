"""Weights & Biases and MLflow keep what `fit` tells them; the real packages, without a network."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchbayes as tb
from torchbayes.integrations.mlflow import MLflow
from torchbayes.integrations.wandb import WandB
from torchbayes.train.tracking import Logger

from ..conformance.problems import blobs, small_net

OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 20, "progress": False}
CONFIG = {"method": "map", "options": {"lr": 0.01, "none": None}}


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    yield package
    package.end_run()


@pytest.mark.filterwarnings("default")
def test_mlflow_has_metrics_settings_and_posterior(mlflow: Any, tmp_path: Path) -> None:
    logger = MLflow(CONFIG, run_name="small")
    assert isinstance(logger, Logger)
    run = tb.fit(small_net, blobs(60), folder=tmp_path / "run", logger=logger, **OPTIONS)
    mlflow.end_run()
    client = mlflow.MlflowClient()
    kept = client.get_run(logger.run_id)
    assert kept.data.params == {"method": "map", "options.lr": "0.01"}
    assert kept.info.run_name == "small"
    points = client.get_metric_history(logger.run_id, "loss")
    assert [point.step for point in points] == [3, 6, 9]
    assert [point.value for point in points] == pytest.approx([row["loss"] for row in run.history])
    path = client.download_artifacts(logger.run_id, "posterior.safetensors", str(tmp_path))
    loaded, wanted = tb.load(path).mean(), run.posterior.mean()
    assert all((loaded[key] == wanted[key]).all() for key in wanted)


@pytest.mark.filterwarnings("default")
def test_mlflow_continues_an_active_run(mlflow: Any) -> None:
    mine = mlflow.start_run()
    assert MLflow().run_id == mine.info.run_id


def records(folder: Path) -> list[Any]:
    """Read the records of an offline run: protocol buffers in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    raw, place, found, parts = file.read_bytes(), 7, [], b""
    while place + 7 <= len(raw):
        left = 32768 - place % 32768
        if left < 7:  # a block's end has no room for a header
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, place)
        parts += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


@pytest.mark.filterwarnings("default")
def test_wandb_has_metrics_settings_and_posterior(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandB(CONFIG, project="tests", mode="offline", dir=str(tmp_path))
    assert isinstance(logger, Logger)
    assert WandB().run is logger.run  # the active one
    run = tb.fit(small_net, blobs(60), folder=tmp_path / "run", logger=logger, **OPTIONS)
    logger.run.finish()
    kept: list[Any] = []
    until = time.monotonic() + 30  # wandb's own process writes the file
    while not any(r.HasField("exit") for r in kept) and time.monotonic() < until:
        time.sleep(0.05)
        kept = records(tmp_path)
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in kept
        if r.WhichOneof("record_type") == "history"
    ]
    assert [row["_step"] for row in rows] == [3, 6, 9]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in run.history])
    config = {u.key or u.nested_key[0]: u.value_json for r in kept for u in _updates(r)}
    assert json.loads(config["method"]) == "map"
    (artifact,) = [
        r.request.log_artifact.artifact if r.HasField("request") else r.artifact
        for r in kept
        if r.HasField("artifact") or r.request.HasField("log_artifact")
    ]
    assert artifact.type == "posterior"
    assert [entry.path for entry in artifact.manifest.contents] == ["posterior.safetensors"]


def _updates(record: Any) -> list[Any]:
    return [*record.config.update, *record.run.config.update]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_the_package_it_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"torchbayes\[{name}\]"):
        (WandB if name == "wandb" else MLflow)()
