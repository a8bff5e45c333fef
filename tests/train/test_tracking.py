"""Loggers are told what the history has; TensorBoard's files can be read back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import torchbayes as tb
from torchbayes.train.tracking import Logger

from ..conformance.problems import blobs, small_net


class Notes:
    """A tracker of two methods."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.files: list[Path] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def artifact(self, path: Path) -> None:
        self.files.append(path)


def test_a_logger_gets_every_epoch_and_the_posterior(tmp_path: Path) -> None:
    notes = Notes()
    assert isinstance(notes, Logger)
    run = tb.fit(
        small_net, blobs(60), "bbb", epochs=3, batch_size=20, folder=tmp_path, logger=notes,
        progress=False,
    )  # fmt: skip
    assert [step for step, _ in notes.rows] == [3, 6, 9]
    for (_, values), row in zip(notes.rows, run.history, strict=True):
        assert values == {name: value for name, value in row.items() if name != "epoch"}
        assert {"loss", "nll", "kl", "lr"} <= values.keys()
    assert notes.files == [tmp_path / "posterior.safetensors"]
    assert tb.load(notes.files[0], small_net()) is not None


@pytest.mark.filterwarnings("default")
def test_tensorboards_files_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tb.fit(
        small_net, blobs(60), epochs=3, batch_size=20, progress=False,
        logger=tb.TensorBoard(tmp_path),
    )  # fmt: skip
    events = EventAccumulator(str(tmp_path)).Reload()
    points = events.Scalars("loss")
    assert [point.step for point in points] == [3, 6, 9]
    assert [p.value for p in points] == pytest.approx([row["loss"] for row in run.history])


def test_without_tensorboard_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"torchbayes\[tracking\]"):
        tb.TensorBoard(tmp_path)
