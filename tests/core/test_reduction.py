"""Sums over three processes, through shared memory and in messages, against sums by NumPy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchbayes.core import distributed, reduction
from torchbayes.core.reduction import Reduction, average_gradients

from ..processes import processes

SHAPES = {"a": (3, 5), "b": (70_001,), "c": (), "d": (0, 2), "e": (2, 2)}
KINDS = {"b": torch.float64, "c": torch.bfloat16}
STEPS = 3
WAYS = ("memory", "messages", "bfloat16")


def value(key: str, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + ord(key))
    return torch.randn(SHAPES[key], generator=generator).to(KINDS.get(key, torch.float32))


def missing(key: str, rank: int, step: int) -> bool:
    """`e` is put by nobody in the second step, and `a` never by the process with number 1."""
    return (key == "e" and step == 1) or (key == "a" and rank == 1)


def summed(folder: Path) -> None:
    with distributed.process_group():
        rank, shared = distributed.rank(), reduction.shared_bytes
        found: dict[str, Any] = {}
        for way in WAYS:
            if way != "memory":
                reduction.shared_bytes = lambda _: None  # type: ignore[attr-defined]
                reduction.BUCKET = 100  # type: ignore[misc]
            if way == "bfloat16":
                os.environ["TORCHBAYES_MESSAGES"] = "bfloat16"
            kept: Reduction[str] = Reduction()
            for step in range(STEPS):
                like = {k: torch.empty(s, dtype=KINDS.get(k)) for k, s in SHAPES.items()}
                kept.begin(like)
                for key in SHAPES:
                    if not missing(key, rank, step):
                        kept.hold(key, value(key, rank, step), 0.5)
                        kept.put(key, value(key, rank, step), rank + 1.0)
                total, sums = kept.finish(float(rank + 1))
                found[f"{way} {step}"] = {k: t.clone() for k, t in sums.items()}
                found[f"{way} {step} total"] = total
            assert (kept._all is not None) == (way == "memory")
        for number, given in enumerate(("float16", "bfloat16" if rank else "float32")):
            os.environ["TORCHBAYES_MESSAGES"] = given
            try:
                Reduction[str]().begin({"x": torch.zeros(1)})
            except ValueError as error:
                found[f"refused {number}"] = str(error)
        del os.environ["TORCHBAYES_MESSAGES"]
        reduction.shared_bytes = shared  # type: ignore[attr-defined]
        weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
        weights[0].grad = torch.tensor([1.0, 2.0]) * rank
        average_gradients(Reduction(), weights, (rank + 1) / 6)
        found["gradients"] = [p.grad for p in weights]
        torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sums")
    done = processes(3, summed, folder)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(3)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", range(STEPS))
def test_sums_are_numpys_and_the_same_everywhere(
    found: list[dict[str, Any]], way: str, step: int
) -> None:
    name = f"{way} {step}"
    assert [one[f"{name} total"] for one in found] == [6.0] * 3
    for key in SHAPES:
        if all(missing(key, rank, step) for rank in range(3)):
            assert all(key not in one[name] for one in found)
            continue
        expected = sum(
            value(key, rank, step).double().numpy() * (rank + 1.5)
            for rank in range(3)
            if not missing(key, rank, step)
        )
        tolerance = {torch.float64: 1e-14, torch.bfloat16: 1e-2}.get(
            found[0][name][key].dtype, 1e-6
        )
        if way == "bfloat16":
            # Half a unit of the last of 8 digits for each process's part and each of two sums on the way,
            # none of which is larger than the sum of absolute values.
            size = sum(
                value(key, rank, step).abs().double().numpy() * (rank + 1.5) for rank in range(3)
            )
            tolerance = max(tolerance, 3 * 2**-9 * float(np.max(size, initial=0.0)) / 6)
        assert found[0][name][key].dtype == KINDS.get(key, torch.float32)
        np.testing.assert_allclose(
            found[0][name][key].double().numpy(), expected / 6, rtol=tolerance, atol=tolerance
        )
        for other in found[1:]:
            assert torch.equal(other[name][key], found[0][name][key])


def test_sums_in_bfloat16_are_others(found: list[dict[str, Any]]) -> None:
    assert not torch.equal(found[0]["bfloat16 0"]["a"], found[0]["messages 0"]["a"])


def test_all_processes_send_the_same_type(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "'float16': expected float32 or bfloat16" in one["refused 0"]
        assert "set it alike for all" in one["refused 1"]


def test_gradients_are_averaged_by_share(found: list[dict[str, Any]]) -> None:
    for one in found:  # (2·1 + 3·2)/6 of [1, 2]; a gradient that is missing everywhere becomes 0
        torch.testing.assert_close(one["gradients"][0], torch.tensor([1.0, 2.0]) * 8 / 6)
        assert one["gradients"][1].tolist() == [0.0]


def test_a_process_alone_keeps_what_it_has() -> None:
    kept: Reduction[str] = Reduction()
    kept.begin({"x": torch.zeros(2), "y": torch.zeros(1)})
    kept.put("x", torch.tensor([2.0, 4.0]))
    total, sums = kept.finish(2.0)
    assert total == 2.0
    assert {key: t.tolist() for key, t in sums.items()} == {"x": [1.0, 2.0]}


def test_bfloat16_is_for_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of terms of the same size, one after the other, ends at 256 times their size."""
    monkeypatch.setenv("TORCHBAYES_MESSAGES", "bfloat16")
    monkeypatch.setattr(reduction, "shared_bytes", lambda _: None)
    monkeypatch.setattr(distributed, "world_size", lambda: 64)
    Reduction[str]().begin({"x": torch.zeros(1)})
    monkeypatch.setattr(distributed, "world_size", lambda: 65)
    with pytest.raises(ValueError, match=r"'bfloat16' and there are 65 processes.*at most 64"):
        Reduction[str]().begin({"x": torch.zeros(1)})


@pytest.mark.parametrize(("count", "error", "bias"), [(2, 0.0025, 0.0), (64, 0.01, -0.004)])
def test_errors_of_sums_in_bfloat16_are_those_of_the_docs(
    count: int, error: float, bias: float
) -> None:
    signed = torch.randn(count, 20_000, generator=torch.Generator().manual_seed(0))
    for terms in (signed, signed.square()):
        total = terms[0].bfloat16()
        for term in terms[1:]:
            total = total + term.bfloat16()
        exact = terms.double().sum(0)
        assert (total - exact).norm() <= 1.1 * error * exact.norm()
    # To the digits that the docs give.
    assert ((total - exact) / exact).mean().item() == pytest.approx(bias, abs=5e-4)


@pytest.mark.parametrize("other", ["cpu", "meta"])
def test_only_tensors_of_one_device_are_sent_early(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks for several accelerators run in several threads."""
    taken: list[Any] = []
    monkeypatch.setattr(distributed, "take_lane", taken.append)
    kept: Reduction[str] = Reduction()
    kept.begin({"x": torch.zeros(1), "y": torch.zeros(1, device=other)}, apart=True)
    assert taken == ([kept] if other == "cpu" else [])


def test_what_a_step_held_that_came_to_no_end_is_forgotten() -> None:
    kept: Reduction[str] = Reduction()
    for _ in range(2):
        kept.begin({"x": torch.zeros(1)})
        kept.hold("x", torch.tensor([1.0]))
    kept.put("x", torch.tensor([2.0]))
    assert kept.finish()[1]["x"].tolist() == [3.0]


def test_an_error_in_the_arrangement_leaves_nothing_to_go_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reduction, "shared_bytes", lambda _: None)
    monkeypatch.setenv("TORCHBAYES_MESSAGES", "float8")
    kept: Reduction[str] = Reduction()
    for _ in range(2):  # the second time, too
        with pytest.raises(ValueError, match="TORCHBAYES_MESSAGES"):
            kept.begin({"x": torch.zeros(1)})


def test_a_parameter_that_is_converted_in_place_gets_other_buffers() -> None:
    layer = torch.nn.Linear(1, 1)
    kept: Reduction[str] = Reduction()
    for dtype in (torch.float32, torch.float64):
        layer.to(dtype)
        kept.begin({"x": layer.weight})
        kept.put("x", torch.tensor([[1 / 3]], dtype=dtype))
        assert kept.finish()[1]["x"].dtype is dtype
