"""Sequences of tasks and what a network keeps of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchbayes.applications.continual import SETTINGS, TaskScores, learn_tasks, markdown_table
from torchbayes.applications.tasks import permuted_tasks, split_tasks
from torchbayes.cli.continual import _show
from torchbayes.core.errors import RunError
from torchbayes.core.reading import read_json
from torchbayes.core.storage import write_json
from torchbayes.data import load_data
from torchbayes.models import mlp
from torchbayes.train.registry import check_options, find_method

from ..processes import Ended, torchbayes


def test_permuted_tasks_are_the_same_pixels_in_other_orders() -> None:
    data = load_data("digits")
    tasks = permuted_tasks(data, 3, seed=1)
    images = data.test.inputs[:20]
    orders = [task.transform(images) for task in tasks]
    assert not torch.equal(orders[0], orders[1])
    for task, moved in zip(tasks, orders, strict=True):
        assert moved.shape == (20, 64)
        plain = images.flatten(1).float() / (255 if images.dtype == torch.uint8 else 1)
        assert torch.equal(moved.sort(1).values, plain.sort(1).values)
        # One order for all images: undoing it gives them back.
        assert torch.equal(moved[:, torch.argsort(task.order)], plain)
    again = permuted_tasks(data, 3, seed=1)
    assert torch.equal(again[2].transform(images), orders[2])


def test_split_tasks_ask_only_among_their_classes() -> None:
    data = load_data("digits")
    tasks = split_tasks(data, 2)
    assert [sorted(set(t.train.targets.tolist())) for t in tasks] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9]
    ]  # fmt: skip
    assert sum(len(t.test) for t in tasks) == len(data.test)
    logits = torch.tensor([[9.0, 9.0, 0.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]], requires_grad=True)
    loss = tasks[1].likelihood.loss(logits, torch.tensor([3]))
    expected = torch.nn.functional.cross_entropy(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits.grad[0, [0, 1, 4, 5, 6, 7, 8, 9]].abs().max() == 0
    probs = tasks[1].likelihood.predictive(logits.detach()[None]).probs
    torch.testing.assert_close(probs[0, 2:4], torch.tensor([0.0, 1.0]).softmax(0))


def test_a_posterior_remembers_what_fine_tuning_forgets() -> None:
    tasks = permuted_tasks(load_data("digits"), 2)
    kept = {}
    vogn = {**SETTINGS["vogn"], "temperature": 0.05, "initial_temperature": 0.05}
    for method, options in {"vogn": vogn, "mle": {"lr": 3e-3}}.items():
        torch.manual_seed(0)
        model = mlp(64, 10, hidden=(40,))
        kept[method] = learn_tasks(model, tasks, method, epochs=12, batch_size=64, **options)
    for scores in kept.values():
        assert min(scores.accuracy[t][t] for t in range(2)) > 0.85  # each task is learned
    # 450 test images: a difference of accuracies has a standard error of √(2·0.24/450) = 0.033.
    assert kept["vogn"].accuracy[1][0] > kept["mle"].accuracy[1][0] + 0.07
    assert kept["vogn"].forgotten < kept["mle"].forgotten - 0.07


def test_scores_and_table_by_hand() -> None:
    scores = TaskScores("vogn", ["a", "b", "c"], [[0.9], [0.8, 0.9], [0.7, 0.6, 0.8]], [1.0] * 3)
    assert scores.mean == pytest.approx([0.9, 0.85, 0.7])
    assert scores.forgotten == pytest.approx((0.2 + 0.3) / 2)
    assert markdown_table({"vogn": scores}).splitlines() == [
        "| after | method | a | b | c | mean |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| a | vogn | 90.0 |  |  | **90.0** |",
        "| b | vogn | 80.0 | 90.0 |  | **85.0** |",
        "| c | vogn | 70.0 | 60.0 | 80.0 | **70.0** |",
    ]


def test_settings_are_options_of_their_methods() -> None:
    for method, options in SETTINGS.items():
        check_options(find_method(method), options)


def test_wrong_arguments_are_named() -> None:
    data = load_data("digits")
    with pytest.raises(ValueError, match="tasks is 0"):
        permuted_tasks(data, 0)
    with pytest.raises(ValueError, match="per_task is 1: expected from 2 to the 10"):
        split_tasks(data, 1)
    with pytest.raises(ValueError, match="there are no tasks"):
        learn_tasks(mlp(64), [])
    with pytest.raises(ValueError, match="cannot be made into tasks"):
        permuted_tasks(load_data("bbb-curve"))


def command(*arguments: str) -> Ended:
    return torchbayes("continual", "--data", "digits", *arguments)


def test_the_command_writes_json_and_markdown(tmp_path: Path) -> None:
    done = command(
        "--tasks", "split", "--method", "ivon", "--epochs", "1", "--hidden", "10",
        "--set", "lr=0.2", "--out", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == read_json(tmp_path / "out" / "continual.json", "")
    assert list(result["methods"]) == ["ivon", "mle"]
    assert result["methods"]["ivon"]["options"]["lr"] == 0.2
    assert [len(row) for row in result["methods"]["mle"]["accuracy"]] == [1, 2, 3, 4, 5]
    table = (tmp_path / "out" / "continual.md").read_text()
    assert "| after | method | 0 1 | 2 3 | 4 5 | 6 7 | 8 9 | mean |" in table
    before = (tmp_path / "out" / "continual.json").read_text()
    done = command("--tasks", "split", "--epochs", "2", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "already holds results: add --resume" in done.stderr
    assert (tmp_path / "out" / "continual.json").read_text() == before


class _Killed(Exception):
    pass


def test_tasks_go_on_where_they_were_stopped_bit_for_bit(tmp_path: Path) -> None:
    tasks = permuted_tasks(load_data("digits"), 3)

    def learn(folder: Path | None, kill: int = 0, **more: Any) -> TaskScores:
        torch.manual_seed(0)
        model = mlp(64, hidden=(10,))

        def after(scores: TaskScores) -> None:
            seen.append(len(scores.accuracy))
            if len(scores.accuracy) == kill:
                raise _Killed

        settings = {"epochs": 1, "after_task": after, "folder": folder, "lr": 1e-3, **more}
        return learn_tasks(model, tasks, "vogn", **settings)

    seen: list[int] = []
    whole = learn(None)
    with pytest.raises(_Killed):
        learn(tmp_path, kill=2)
    seen.clear()
    again = learn(tmp_path)
    assert seen == [2, 3]  # only the last task was learned
    assert again.accuracy == whole.accuracy
    with pytest.raises(RunError, match="holds tasks with epochs = 1, not 2"):
        learn(tmp_path, epochs=2)
    with pytest.raises(RunError, match="holds tasks with options"):
        learn(tmp_path, lr=1e-4)
    for other in (
        replace(tasks[2], train=tasks[2].train.subset(torch.arange(100))),
        replace(tasks[2], order=tasks[1].order),
    ):
        with pytest.raises(
            RunError, match="holds tasks of other data: continue them with their own"
        ):
            learn_tasks(
                mlp(64, hidden=(10,)),
                [*tasks[:2], other],
                "vogn",
                epochs=1,
                folder=tmp_path,
                lr=1e-3,
            )
    with pytest.raises(RunError, match="began with another network or other weights"):
        learn_tasks(mlp(64, hidden=(10,)), tasks, "vogn", epochs=1, folder=tmp_path, lr=1e-3)
    older = {k: v for k, v in read_json(tmp_path / "tasks.json", "").items() if "checksum" not in k}
    write_json(tmp_path / "tasks.json", older)
    assert learn(tmp_path).accuracy == whole.accuracy


def test_ten_tasks_can_be_read_on_an_ordinary_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    orders = [f"order {number}" for number in range(1, 11)]
    accuracy = [0.5 + 0.01 * number for number in range(10)]
    scores = TaskScores("vogn", orders, [accuracy[: number + 1] for number in range(10)])
    _show(tmp_path, {"vogn": scores, "mle": scores}, as_json=False)
    shown = capsys.readouterr().out
    assert "…" not in shown
    for order, value in zip(orders, accuracy, strict=True):
        cells = [line.split("│")[1:-1] for line in shown.splitlines() if f" {order} " in line]
        assert [cell.strip() for cell in cells[0]] == [order, *2 * [f"{100 * value:.1f}"]]


def test_the_command_refuses_what_cannot_be(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    for arguments, sentence in (
        (["--method", "ensemble"], "takes no prior: choose one of"),
        (["--tasks", "rotated"], "expected permuted or split"),
    ):
        done = command(*arguments, *out)
        assert done.returncode == 2
        assert sentence in done.stderr.replace("\n", " ")
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
