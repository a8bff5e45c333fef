"""Several chains: side by side as each on its own; one that breaks down does not take others with it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchbayes as tb
from torchbayes.core import distributed
from torchbayes.prior import GaussianPrior, resnetpp_prior
from torchbayes.train.chains import SamplerMethod
from torchbayes.train.fit import _chosen
from torchbayes.train.progress import Progress
from torchbayes.train.run_folder import RunFolder
from torchbayes.train.stacked_chains import StackedChains, StackedPrior

from ..processes import processes
from ..stopping import StopAfter, Stopped

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def fit(make: Any = net, method: str = "atmc", **options: Any) -> tb.Run:
    settings = {"epochs": 4, "batch_size": 6, "progress": False, "samples": 5, **options}
    return tb.fit(make, (INPUTS, TARGETS), method, **settings)


def states(run: tb.Run) -> list[torch.Tensor]:
    return [torch.cat([t.reshape(-1) for t in w.values()]) for w in run.posterior]


def test_gradients_side_by_side_are_those_of_each_network() -> None:
    nets = [net() for _ in range(3)]
    chains = StackedChains(net(), tb.Categorical(), [tb.snapshot(n) for n in nets])
    losses = chains.losses(INPUTS, TARGETS)
    losses.sum().backward()
    for number, one in enumerate(nets):
        own = F.cross_entropy(one(INPUTS), TARGETS)
        own.backward()
        assert losses[number].item() == pytest.approx(own.item(), rel=1e-5)
        for stacked, p in zip(chains.model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(stacked.grad[number], p.grad, rtol=1e-4, atol=1e-6)


def test_a_prior_of_rows_is_the_same_for_every_chain() -> None:
    shapes = {"a.direction": (3, 4, 2), "a.scale": (3, 4), "a.bias": (3, 4)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    prior = resnetpp_prior()
    stacked = StackedPrior.of(prior)
    gradients = stacked.grad(weights)
    rows = [{name: w[i] for name, w in weights.items()} for i in range(3)]
    for number, row in enumerate(rows):
        for name, gradient in prior.grad(row).items():
            assert torch.equal(gradients[name][number], gradient)
    total = sum(float(prior.log_prob(row)) for row in rows)
    assert float(stacked.log_prob(weights)) == pytest.approx(total)
    plain = GaussianPrior()
    assert StackedPrior.of(plain) is plain


@pytest.mark.parametrize("method", ["sgld", "psgld", "sghmc", "sgnht", "atmc"])
def test_every_sampler_runs_side_by_side(method: str) -> None:
    run = fit(method=method, chains=3, side_by_side=True)
    samples = run.posterior
    assert isinstance(samples, tb.Samples)
    assert samples.chains == [0, 1, 2] * 5
    last = states(run)[-3:]
    # Chains are far apart: they began at random weights of their own.
    assert min(float((a - b).norm()) for a in last for b in last if a is not b) > 0.5
    assert run.history[-1]["loss"] < 0.69
    assert len(run.history) == 4


def test_side_by_side_resumes_bit_equal(tmp_path: Path) -> None:
    class Stop(Progress):
        left = 17

        def start(self, name: str, total: int, done: int) -> None:
            pass

        def advance(self, loss: float) -> None:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("stopped")

    options: dict[str, Any] = {"chains": 2, "side_by_side": True, "checkpoint_seconds": 0.0}
    whole = fit(**options, folder=tmp_path / "a")
    with pytest.raises(RuntimeError, match="stopped"):
        fit(**{**options, "progress": Stop()}, folder=tmp_path / "b")
    resumed = fit(**options, folder=tmp_path / "b", resume=True)
    for a, b in zip(states(whole), states(resumed), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "a" / "traces.jsonl").read_text() == (
        tmp_path / "b" / "traces.jsonl"
    ).read_text()


class Level(nn.Module):
    """A network whose output is multiplied by a weight."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.net = net()
        self.level = nn.Parameter(torch.tensor(level))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x) * self.level
        return out


def second_is_broken() -> Any:
    made = iter([1.0, float("nan"), 1.0, 1.0, 1.0, 1.0])
    return lambda: Level(next(made))


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_chain_that_dies_leaves_the_others(
    side_by_side: bool, on_disk: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path / "bank") if on_disk else None
    with caplog.at_level(logging.WARNING, "torchbayes"):
        # Stacked chains take the 1st to 3rd network; one after another, a dead one takes one more.
        run = fit(second_is_broken(), chains=3, side_by_side=side_by_side, sample_folder=folder)
    assert "chain 1 broke down after 0 updates" in caplog.text
    assert sorted(run.posterior.chains) == [0] * 5 + [2] * 5
    assert all(bool(torch.isfinite(state).all()) for state in states(run))
    assert bool(torch.isfinite(run.predict(INPUTS).probs).all())


def test_a_single_chain_that_dies_is_a_failure() -> None:
    with pytest.raises(tb.TrainingError, match="not finite"):
        fit(lambda: Level(float("nan")))
    for side_by_side in (False, True):
        with pytest.raises(tb.TrainingError, match="not finite"):
            fit(lambda: Level(float("nan")), chains=2, side_by_side=side_by_side)


def test_what_cannot_run_side_by_side_is_named() -> None:
    with pytest.raises(ValueError, match=r"buffer '1\.running_mean'"):
        fit(
            lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
            chains=2, side_by_side=True,
        )  # fmt: skip
    with pytest.raises(ValueError, match="one thermostat cannot serve several chains"):
        fit(method="sgnht", chains=2, side_by_side=True, per_parameter=False)


def test_the_kinetic_temperature_is_one_at_equilibrium() -> None:
    """A flat target: momenta are exactly their equilibrium's, whatever the kinetic energy."""
    for limit in (float("inf"), 1e-2):
        wide = nn.Linear(400, 50)
        sampler = tb.ATMC(
            wide, lr=0.05, train_size=1, average_step=1e-2, max_step=limit,
            prior=GaussianPrior(precision=1e-6), generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        for _ in range(150):
            for p in wide.parameters():
                p.grad = torch.zeros_like(p)
            sampler.step()
        found = sampler.vitals()
        assert found["temperature"][""] == pytest.approx(1.0, abs=0.05)
        assert abs(found["thermostat"][""]) < 0.5


@pytest.mark.parametrize("method", ["sgld", "atmc"])
def test_a_small_network_has_four_chains_by_default(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="torchbayes")
    run = fit(method=method)
    assert "init=network starts a single chain from it" in caplog.text
    assert set(run.posterior.chains) == {0, 1, 2, 3}  # type: ignore[attr-defined]
    assert len(run.history) == 4
    assert set(fit(method=method, chains=1).posterior.chains) == {0}  # type: ignore[attr-defined]


def test_a_network_that_cannot_be_stacked_or_is_given_has_one_chain() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            return (
                out if float(out.detach().sum()) < 1e9 else out * 0
            )  # no vmap goes through .item()

    assert set(fit(Odd).posterior.chains) == {0}  # type: ignore[attr-defined]
    normed = lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))  # noqa: E731
    assert set(fit(normed).posterior.chains) == {0}  # type: ignore[attr-defined]
    assert set(fit(init=net()).posterior.chains) == {0}  # type: ignore[attr-defined]


def test_chains_side_by_side_each_learn_a_noise_level(tmp_path: Path) -> None:
    x, y = INPUTS, INPUTS[:, :1] * 2 + 0.1 * torch.randn(60, 1)
    regression = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))  # noqa: E731
    settings: dict[str, Any] = {"epochs": 6, "batch_size": 6, "progress": False}
    run = tb.fit(regression, (x, y), "sgld", folder=tmp_path / "run", **settings)
    state = RunFolder(tmp_path / "run").checkpoint.read()
    assert state is not None
    levels = torch.stack([end["log_std"] for end in state["noise"]["ends"]])
    assert levels.shape == (4,)
    assert len(set(levels.tolist())) == 4
    pooled = levels.mul(2).exp().mean().sqrt()  # the root mean square
    torch.testing.assert_close(run.likelihood.std.detach(), pooled)  # type: ignore[attr-defined]


def many(folder: Path, stop: int, options: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    try:
        fit(
            samples=2, epochs=2, batch_size=15, folder=folder, resume=True, checkpoint_seconds=0.0,
            progress=StopAfter(stop + rank) if stop else False, **options,
        )  # fmt: skip
    except (Stopped, distributed.LostProcessError):
        assert stop


def kept(folder: Path) -> tb.Samples:
    posterior = tb.load(folder / "posterior.safetensors", net())
    assert isinstance(posterior, tb.Samples)
    return posterior


@pytest.mark.parametrize("options", [{}, {"chains": 4, "side_by_side": True}])
def test_every_process_has_chains_side_by_side(options: dict[str, Any], tmp_path: Path) -> None:
    """Stopped in two processes, the run goes on with one or three of them, with the same draws."""
    for name, counts in {"whole": (2,), "fewer": (2, 1), "more": (2, 3)}.items():
        for part, count in enumerate(counts):
            stop = 4 if part + 1 < len(counts) else 0
            done = processes(count, many, tmp_path / name, stop, options)
            assert done.returncode == 0, done.stderr
    whole = kept(tmp_path / "whole")
    assert sorted(whole.chains) == sorted([*range(8)] * 2)
    starts = [torch.cat([t.reshape(-1) for t in weights.values()]) for weights in whole]
    assert min(float((a - b).norm()) for a in starts[-4:] for b in starts[:4]) > 0.5
    for name in ("fewer", "more"):
        other = kept(tmp_path / name)
        assert other.chains == whole.chains
        for one, two in zip(whole, other, strict=True):
            assert all(torch.equal(one[n], two[n]) for n in one), name


def test_a_resumed_run_keeps_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether chains can be stacked is not tried again, and an older run of processes has one chain each."""
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(Stopped):
        fit(**settings, progress=StopAfter(17))
    files = RunFolder(tmp_path)
    assert files.read_config()["chosen"] == {"chains": 4, "side_by_side": True}
    monkeypatch.setattr(SamplerMethod, "_several", None)
    run = fit(**settings, resume=True)
    assert run.settings["chosen"] == {"chains": 4, "side_by_side": True}
    assert run.posterior.chains == [0, 1, 2, 3] * 5  # type: ignore[attr-defined]
    files.write_config({k: v for k, v in files.read_config().items() if k != "chosen"})
    assert _chosen(tb.METHODS["sgld"], {}, tmp_path, 2) == {"chains": 1}
    assert _chosen(tb.METHODS["sgld"], {"chains": 2}, tmp_path, 2) == {}
    assert _chosen(tb.METHODS["sgld"], {}, tmp_path, 1) == {}
