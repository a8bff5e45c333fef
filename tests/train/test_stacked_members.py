"""Members of an ensemble side by side: the same as one after another, up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.prior import GroupLaplacePrior
from torchbayes.train.run_folder import RunFolder

from ..stopping import StopAfter, Stopped

INPUTS = torch.randn(70, 4, generator=torch.Generator().manual_seed(0))
CLASSES = (INPUTS[:, 0] > 0).long()
NUMBERS = INPUTS[:, :1].sin() + 0.1 * INPUTS[:, 1:2]


def net(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, outputs))


def fit(targets: Tensor = CLASSES, make: Any = None, **options: Any) -> tb.Run:
    outputs = 2 if targets is CLASSES else 1
    settings = {"epochs": 3, "members": 3, "batch_size": 16, "progress": False, "lr": 0.01}
    given = make or (lambda: net(outputs))
    return tb.fit(given, (INPUTS, targets), "ensemble", **{**settings, **options})


def members(run: tb.Run) -> list[dict[str, Tensor]]:
    assert isinstance(run.posterior, tb.Samples)
    return list(run.posterior)


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (CLASSES, {"optimizer": "sgd", "schedule": "cosine"}),
        (CLASSES, {"prior": GroupLaplacePrior(), "transform": jitter}),
        (CLASSES, {"init": [net() for _ in range(3)]}),
        (CLASSES, {"init": net(), "params": "3.*"}),
        (CLASSES, {"weights": INPUTS[:, 2].abs()}),
        (NUMBERS, {"prior": 3.0}),
    ],
    ids=["sgd", "prior and transform", "given starts", "a part", "weights", "noise"],
)
def test_members_are_those_trained_one_after_another(
    targets: Tensor, options: dict[str, Any], tmp_path: Path
) -> None:
    runs, levels = [], []
    for side_by_side in (True, False):
        folder = tmp_path / str(side_by_side)
        runs.append(fit(targets, side_by_side=side_by_side, folder=folder, **options))
        state = RunFolder(folder).checkpoint.read()
        assert state is not None
        levels.append(state["noise"]["ends"])
    together, apart = map(members, runs)
    assert len(runs[0].history) == 3
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(levels[0], levels[1], rtol=1e-4, atol=1e-5)
    if targets is NUMBERS:
        assert len({float(end["log_std"]) for end in levels[0]}) == 3
    assert any(not torch.equal(together[0][name], together[1][name]) for name in together[0])
    mean = sum(row["nll"] for row in runs[1].history[2::3]) / 3
    assert runs[0].history[2]["nll"] == pytest.approx(mean, rel=1e-4)


def test_resumes_bit_equal(tmp_path: Path) -> None:
    whole = fit(NUMBERS, side_by_side=True, folder=tmp_path / "a")
    settings: dict[str, Any] = {
        "side_by_side": True, "folder": tmp_path / "b", "checkpoint_seconds": 0.0
    }  # fmt: skip
    with pytest.raises(Stopped):
        fit(NUMBERS, **settings, progress=StopAfter(8))
    resumed = fit(NUMBERS, **settings, resume=True)
    assert torch.equal(whole.likelihood.std, resumed.likelihood.std)  # type: ignore[attr-defined]
    for one, other in zip(members(whole), members(resumed), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_member_that_breaks_down_takes_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in the second epoch the second member's loss is not finite: shorter steps from the first on."""
    calls, real = [0], tb.Categorical.loss

    def broken(self: Any, outputs: Tensor, targets: Tensor, *more: Any) -> Tensor:
        loss = real(self, outputs, targets, *more)
        calls[0] += 1
        return loss * float("nan") if calls[0] == 8 else loss

    monkeypatch.setattr(tb.Categorical, "loss", broken)
    with pytest.warns(UserWarning, match="goes back to the beginning of epoch 2 with .* 0.3 times"):
        run = fit(side_by_side=True, likelihood=tb.Categorical())
    assert run.history[-1]["lr"] == pytest.approx(0.003)
    assert all(t.isfinite().all() for member in members(run) for t in member.values())
    monkeypatch.undo()
    with (
        pytest.warns(UserWarning, match="goes back"),
        pytest.raises(tb.TrainingError, match="not finite"),
    ):
        fit(side_by_side=True, optimizer="sgd", lr=1e30)


def test_what_members_side_by_side_cannot_take_is_said() -> None:
    normed = lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))  # noqa: E731
    with pytest.raises(
        ValueError, match="members side by side need data in memory, and no accumul"
    ):
        fit(side_by_side=True, clip_norm=1.0)
    with pytest.raises(ValueError, match="share what is frozen"):
        fit(side_by_side=True, init=[net() for _ in range(3)], params="3.*")
    with pytest.raises(ValueError, match=r"buffer '1\.running_mean'"):
        fit(make=normed, side_by_side=True)


BINARY = (INPUTS[:, :1] > 0).float()


@pytest.mark.parametrize(
    ("targets", "outputs", "options"),
    [
        (BINARY, 1, {"likelihood": tb.Bernoulli()}),
        (BINARY.mul(3), 1, {"likelihood": tb.Poisson()}),
        (CLASSES, 2, {"likelihood": tb.Categorical(ignore_index=-100)}),
    ],
    ids=["binary", "counts", "ignored"],
)
def test_losses_that_look_at_their_targets_are_refused_before_training(
    targets: Tensor, outputs: int, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"vmap can run.*leave out side_by_side"):
        fit(targets, lambda: net(outputs), side_by_side=True, **options)
