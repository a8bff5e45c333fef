"""Learned noise levels: every network of a run owns one, and the run's likelihood combines them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.train.checkpoint import Checkpoint
from torchbayes.train.noise import LearnedNoise

from ..processes import processes
from ..stopping import StopAfter, Stopped

NOISE = 0.05


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(128, 3, generator=generator)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]])
    return inputs, targets + NOISE * torch.randn(128, 1, generator=generator)


X, Y = problem()


def least_squares() -> float:
    """Return the standard deviation of the noise of greatest likelihood: that of the residuals."""
    ones = torch.cat([X, torch.ones(len(X), 1)], 1)
    residuals = Y - ones @ torch.linalg.lstsq(ones, Y).solution
    return float(residuals.square().mean().sqrt())


def fit(method: str, **options: Any) -> tb.Run:
    settings = {"epochs": 120, "batch_size": 16, "progress": False, **options}
    return tb.fit(lambda: nn.Linear(3, 1), X, Y, method, **settings)


def std(run: tb.Run) -> float:
    assert isinstance(run.likelihood, tb.GaussianNoise)
    return float(run.likelihood.std.detach())


def test_members_learn_their_noise_as_if_each_were_alone() -> None:
    run = fit("ensemble", members=3, lr=0.03, prior=0, schedule="cosine")
    assert isinstance(run.posterior, tb.Samples)
    starts = [row["loss"] for row in run.history[::120]]
    ends = [row["loss"] for row in run.history[119::120]]
    # With the noise of a trained member, 0.05, a new one's first losses were in the hundreds.
    assert max(starts) < 3 * min(starts)
    assert max(ends) - min(ends) < 0.1
    assert std(run) == pytest.approx(least_squares(), rel=0.1)
    for weights in run.posterior:
        assert torch.allclose(weights["weight"], torch.tensor([[1.0, -2.0, 0.5]]), atol=0.05)


def test_chains_one_after_another_learn_their_noise_as_if_each_were_alone() -> None:
    run = fit("sgld", chains=2, samples=1)
    starts = [row["loss"] for row in run.history[::120]]
    assert max(starts) < 3 * min(starts)
    assert isinstance(run.posterior, tb.Samples)
    assert set(run.posterior.chains) == {0, 1}
    # With the first chain's noise at its end, the second would have broken down; alone it takes the same way.
    assert std(run) == pytest.approx(std(fit("sgld", samples=1)), rel=0.1)


class Fragile(nn.Linear):
    """A layer that gives infinity once it has been called in training more than `calls` times."""

    calls = 10**9

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            Fragile.calls -= 1
        return super().forward(inputs) * (1.0 if Fragile.calls >= 0 else math.inf)


@pytest.mark.filterwarnings("ignore:do not trust")  # the network itself stays broken
def test_the_noise_of_a_chain_that_breaks_down_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates = 20 * 8
    monkeypatch.setattr(Fragile, "calls", updates)

    def run(chains: int) -> tb.Run:
        return tb.fit(
            lambda: Fragile(3, 1),
            X,
            Y,
            "sgld",
            epochs=20,
            batch_size=16,
            chains=chains,
            progress=False,
        )

    both = run(2)
    monkeypatch.setattr(Fragile, "calls", 10**9)
    assert std(both) == std(run(1))


def test_the_pooled_level_keeps_the_variance_of_the_mixture() -> None:
    """Law of total variance: the mean of the noise variances plus the variance of the means."""
    levels = torch.tensor([0.1, 0.5, 2.0])
    likelihood = tb.GaussianNoise(learned=True)
    likelihood.pool([{"log_std": level.log()} for level in levels])
    means = torch.tensor([1.0, 2.0, 4.0])
    mixture = likelihood.predictive(means.reshape(3, 1, 1))
    wanted = levels.square().mean() + means.var(correction=0)
    assert float(mixture.std.square()) == pytest.approx(float(wanted), rel=1e-5)


def test_the_learned_parameters_of_other_likelihoods_are_averaged() -> None:
    likelihood = tb.StudentT(learned=True, learned_df=True)
    ends = [
        {"log_std": torch.tensor(-1.0), "log_excess": torch.tensor(value)} for value in (0.0, 1.0)
    ]
    likelihood.pool(ends)
    assert float(likelihood.log_std.detach()) == pytest.approx(-1.0)
    assert float(likelihood.log_excess.detach()) == pytest.approx(0.5)


def test_a_gradient_that_is_not_finite_leaves_the_level_alone() -> None:
    likelihood = tb.GaussianNoise(learned=True)
    noise = LearnedNoise(likelihood)
    likelihood.log_std.grad = torch.tensor(math.nan)
    noise.step()
    assert float(likelihood.std.detach()) == 1.0


@pytest.mark.parametrize(
    ("method", "options"), [("ensemble", {"members": 3}), ("sgld", {"chains": 3})]
)
@pytest.mark.parametrize("updates", [20, 32, 40])
def test_a_resumed_run_has_the_same_noise(
    method: str, options: dict[str, Any], updates: int, tmp_path: Path
) -> None:
    options = {**options, "epochs": 2}
    whole = fit(method, **options)
    with pytest.raises(Stopped):
        fit(method, **options, folder=tmp_path, checkpoint_seconds=0, progress=StopAfter(updates))
    resumed = fit(method, **options, folder=tmp_path, resume=True)
    assert std(resumed) == std(whole)
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in whole.history]
    again = fit(method, **options, folder=tmp_path, resume=True)
    assert std(again) == std(whole)
    state = Checkpoint(tmp_path / "checkpoint.safetensors").read()
    assert state is not None
    assert float(state["likelihood"]["log_std"].exp()) == std(whole)


def test_a_likelihood_that_is_passed_is_not_changed() -> None:
    """Two runs with the same likelihood each learn a level of their own."""
    likelihood = tb.GaussianNoise(learned=True)
    first = fit("map", likelihood=likelihood, epochs=5)
    level = std(first)
    second = fit("map", likelihood=likelihood, epochs=5)
    assert float(likelihood.std.detach()) == 1.0
    assert std(first) == std(second) == level != 1.0
    fit("map", likelihood=likelihood, epochs=5, in_place=True)
    assert float(likelihood.std.detach()) == level


def _train_and_write(folder: str) -> None:
    run = fit("ensemble", members=3, epochs=2)
    Path(folder, os.environ["RANK"]).write_text(repr(std(run)))


def test_processes_agree_on_the_noise_of_all_members(tmp_path: Path) -> None:
    """Two members in one process and one in the other."""
    ended = processes(2, _train_and_write, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    first, second = (float((tmp_path / rank).read_text()) for rank in "01")
    assert first == second
    assert 0.5 < first < 2
