"""A training that breaks down is noticed within the epoch, goes back, and never ends in silence."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.train.guard import RETRIES, SLOWER, Guard


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator)
    return x, (x[:, 0] > 0).long()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))


def fit(method: str, **options: Any) -> tb.Run:
    settings = {"epochs": 10, "batch_size": 16, "progress": False, **options}
    return tb.fit(network, data(), method, **settings)


def test_a_loss_that_explodes_goes_back_with_shorter_steps_and_says_so() -> None:
    with pytest.warns(
        UserWarning, match=r"loss has grown from .* goes back .* 0\.3 times"
    ) as caught:
        run = fit("map", lr=8.0)
    tries = len(caught)
    assert 1 <= tries <= RETRIES
    assert run.history[-1]["lr"] == pytest.approx(8.0 * SLOWER**tries)
    assert [row["epoch"] for row in run.history] == list(range(1, 11))
    assert run.history[-1]["loss"] < 10.0


def test_the_schedule_goes_on_with_the_smaller_rate() -> None:
    with pytest.warns(UserWarning, match="goes back") as caught:
        run = fit("map", lr=30.0, schedule=tb.Schedule("step", milestones=(5,), gamma=0.1))
    assert run.history[-1]["lr"] == pytest.approx(3.0 * SLOWER ** len(caught))


@pytest.mark.parametrize("method", ["map", "sgld", "ivon", "bbb"])
def test_a_breakdown_that_shorter_steps_do_not_help_is_an_error(method: str) -> None:
    with (
        pytest.warns(UserWarning, match="goes back") as caught,
        pytest.raises(tb.TrainingError, match=r"step \d+ .*(weight|layer) '.*try a smaller lr"),
    ):
        fit(method, lr=1e9)
    assert len(caught) == RETRIES


def test_data_that_are_not_finite_are_no_reason_to_go_back() -> None:
    x, y = data()
    x[3, 2] = math.nan
    with pytest.raises(tb.TrainingError, match="inputs have a non-finite value"):
        tb.fit(network, (x, y), "map", epochs=2, progress=False)


def test_a_run_that_went_back_resumes_to_the_same_weights(tmp_path: Path) -> None:
    class Stop(tb.train.progress.Progress):
        def __init__(self, after: int) -> None:
            self.left = after

        def start(self, name: str, total: int, done: int) -> None: ...

        def advance(self, loss: float) -> None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="goes back"):
        whole = fit("map", lr=8.0)
    with pytest.warns(UserWarning, match="goes back"), pytest.raises(KeyboardInterrupt):
        fit("map", lr=8.0, folder=tmp_path, checkpoint_seconds=0, progress=Stop(70))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = fit("map", lr=8.0, folder=tmp_path, resume=True)
    for name, weight in whole.posterior.mean().items():
        assert torch.equal(weight, again.posterior.mean()[name])


def test_a_posterior_worse_than_the_start_is_doubted() -> None:
    class Forgets(nn.Linear):
        """A network that is wrong about everything in evaluation mode."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else -5 * super().forward(x)

    with pytest.warns(UserWarning, match=r"do not trust .* worse than .* before training \(0\."):
        tb.fit(
            lambda: Forgets(5, 2), data(), "map", epochs=10, batch_size=16, lr=0.1, progress=False
        )


def test_a_posterior_is_checked_on_more_than_a_small_batch() -> None:
    """`fit` makes batches of 8 here, and of the first of them this broken posterior is right enough."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = tb.fit(
            lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)),
            (x, y), "ivon", epochs=10, lr=100.0, progress=False,
        )  # fmt: skip
    assert -float(run.predict(x, 16).log_prob(y).double().mean()) > 1.0
    assert any("do not trust this posterior" in str(one.message) for one in caught)


def test_targets_far_from_unit_size_are_mentioned() -> None:
    x = torch.randn(64, 2)
    with pytest.warns(UserWarning, match=r"targets have mean .* standardise them"):
        tb.fit(nn.Linear(2, 1), (x, 1e4 + x[:, :1]), "map", epochs=1, progress=False)


def test_the_guard_judges_by_several_losses() -> None:
    guard = Guard()
    assert not any(guard.add(loss) for loss in (1.0, 500.0, 1.0, 0.9, 400.0, 1.1))  # outliers
    guard = Guard()
    grown = [guard.add(loss) for loss in (1.0, *(50.0,) * 10)]
    assert not grown[1]
    assert grown[-1]
    guard = Guard()
    assert not any(guard.add(loss) for loss in (-3.0, *(20.0,) * 30))  # low noise: within ten times
    assert not guard.add(math.nan)
