"""Burn-in, thinning, cycles, chains and banks on disk of the sampling methods."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.models import resnetpp20
from torchbayes.prior import resnetpp_prior
from torchbayes.train.chains import Collection
from torchbayes.train.loop import Training
from torchbayes.train.progress import NoProgress
from torchbayes.train.run_folder import RunError, RunFolder

from ..processes import torchbayes
from ..stopping import StopAfter, Stopped

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def fit(method: str = "atmc", **options: Any) -> tb.Run:
    """Ten updates an epoch."""
    settings = {"epochs": 4, "batch_size": 6, "progress": False, "chains": 1, **options}
    return tb.fit(net, (INPUTS, TARGETS), method, **settings)


def bank(run: tb.Run) -> list[torch.Tensor]:
    assert isinstance(run.posterior, tb.Samples)
    return [torch.cat([t.reshape(-1) for t in w.values()]) for w in run.posterior]


# -- Which states are kept ----------------------------------------------------------------------------


def test_the_papers_schedule_gives_the_papers_number_of_samples() -> None:
    """Section 5.1: 1,000 epochs in cycles of 50, collected after 150."""
    ends = tuple(range(50, 1001, 50))
    assert sorted(Collection(burn_in=0.15).updates(1000, ends)) == list(range(200, 1001, 50))


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 6),
        ({"lr": 0.01}, 20),
        ({"burn_in": 0.5}, 20),
        ({"samples": 4}, 4),
        ({"burn_in": 0.0, "samples": 40}, 40),
        ({"burn_in": 0.25, "thinning": 7}, 5),
        ({"schedule": tb.Schedule("cyclic", cycles=8), "burn_in": 0.25}, 6),
    ],
)
def test_number_of_samples(options: dict[str, Any], count: int) -> None:
    run = fit(**options)
    states = bank(run)
    assert len(states) == count
    last = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
    assert torch.equal(states[-1], last)
    assert len({tuple(s.tolist()) for s in states}) == count


def test_cycles_follow_the_papers_formula_and_keep_their_last_states() -> None:
    """h_t = h0/2 [1 + cos(π mod(t, n)/n)], with the /n that the paper leaves out."""
    seen: list[float] = []
    states: list[torch.Tensor] = []
    from torchbayes.optim.atmc import ATMC

    original = ATMC.step

    def spy(self: ATMC, closure: Any = None) -> Any:
        seen.append(self.param_groups[0]["lr"])
        result = original(self, closure)
        states.append(torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ATMC, "step", spy)
        run = fit(lr=0.02, schedule=tb.Schedule("cyclic", cycles=4), burn_in=0.0)
    n = 10
    expected = [0.02 / 2 * (1 + math.cos(math.pi * (t % n) / n)) for t in range(40)]
    assert seen == pytest.approx(expected, rel=1e-12)
    kept = bank(run)
    assert len(kept) == 4
    for index, state in enumerate(kept):
        assert torch.equal(state, states[10 * index + 9])


def test_polynomial_decay_is_welling_and_tehs() -> None:
    """ε_t = a (b + t)^−γ, which is ε_0 (1 + t/b)^−γ."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = tb.Schedule("polynomial", power=0.6, offset=2.0)
    scheduler = schedule.build(optimizer, epochs=5, steps_per_epoch=10)
    a = 0.3 * 20**0.6
    for t in range(50):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(a * (20 + t) ** -0.6)
        optimizer.step()
        scheduler.step()
    with pytest.raises(ValueError, match="power is -1"):
        tb.Schedule("polynomial", power=-1.0)


# -- Chains and banks ---------------------------------------------------------------------------------


def test_chains_start_apart_and_each_gives_its_samples() -> None:
    one, two = bank(fit(samples=5)), bank(fit(samples=5, chains=2))
    assert len(two) == 10
    for first, again in zip(one, two[:5], strict=True):
        assert torch.equal(first, again)
    within = (two[3] - two[4]).norm()
    assert (two[4] - two[9]).norm() > 3 * within


def test_the_first_chain_starts_from_the_given_weights() -> None:
    trained = net()
    with torch.no_grad():
        for p in trained.parameters():
            p.fill_(5.0)
    run = tb.fit(
        trained, (INPUTS, TARGETS), "atmc", epochs=1, samples=1, average_step=1e-4, progress=False
    )
    assert (bank(run)[0] - 5).abs().max() < 0.1


# Cycles end after updates 4, 8, 12, 15, … of each chain: at 8 and 45 a sample is newer than its checkpoint.
@pytest.mark.parametrize("stop", [3, 8, 31, 45])
@pytest.mark.parametrize("on_disk", [False, True])
def test_resume_in_a_cycle_or_the_second_chain(stop: int, on_disk: bool, tmp_path: Path) -> None:
    def options(name: str) -> dict[str, Any]:
        folder = str(tmp_path / f"{name}-samples") if on_disk else None
        return {
            "folder": tmp_path / name, "sample_folder": folder, "chains": 2, "burn_in": 0.2,
            "schedule": tb.Schedule("cyclic", cycles=8), "epochs": 3,
        }  # fmt: skip

    whole = fit(**options("a"))
    assert len(bank(whole)) == 2 * 7
    with pytest.raises(Stopped):
        fit(progress=StopAfter(stop), checkpoint_seconds=0, **options("b"))
    resumed = fit(resume=True, **options("b"))
    for left, right in zip(bank(whole), bank(resumed), strict=True):
        assert torch.equal(left, right)
    assert (resumed.posterior.folder is not None) is on_disk  # type: ignore[attr-defined]
    saved = tb.load(tmp_path / "b" / "posterior.safetensors", resumed.model)
    assert len(saved) == 14  # type: ignore[arg-type]


def test_a_bank_on_disk_is_the_one_in_memory(tmp_path: Path) -> None:
    memory, disk = bank(fit()), bank(fit(sample_folder=str(tmp_path / "bank")))
    assert len(list((tmp_path / "bank").glob("*.safetensors"))) == 6
    for left, right in zip(memory, disk, strict=True):
        assert torch.equal(left, right)
    with pytest.raises(ValueError, match="already holds 6 samples"):
        fit(sample_folder=str(tmp_path / "bank"))


def test_a_bank_in_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    refusals: list[str] = []

    class Beside(NoProgress):
        """Starts two others in mid-training, one of them with a run folder of its own."""

        def advance(self, loss: float) -> None:
            if not refusals:
                for folder in (None, tmp_path / "second"):
                    with pytest.raises(RunError, match="is in use by process") as refused:
                        fit(sample_folder=str(tmp_path / "bank"), folder=folder)
                    refusals.append(str(refused.value))

    disturbed = fit(sample_folder=str(tmp_path / "bank"), progress=Beside())
    assert len(refusals) == 2
    for one, other in zip(bank(fit()), bank(disturbed), strict=True):
        assert torch.equal(one, other)
    alone = fit(folder=tmp_path / "one", sample_folder=str(tmp_path / "one"))  # the same folder
    assert len(bank(alone)) == len(bank(disturbed))


def test_a_kill_after_a_chain_broke_down(tmp_path: Path) -> None:
    """The last checkpoint still counts the samples that the broken chain has taken with it."""
    options: dict[str, Any] = {
        "folder": tmp_path / "run", "sample_folder": str(tmp_path / "bank"), "chains": 2, "epochs": 2,
    }  # fmt: skip

    class Breaks(NoProgress):
        """The first chain breaks down at step 16, and the process is killed before it can save."""

        def __init__(self, kill: bool) -> None:
            self.steps, self.kill = 0, kill

        def start(self, name: str, total: int, done: int) -> None:
            self.steps = done

        def advance(self, loss: float) -> None:
            self.steps += 1
            if self.steps == 15:
                broken.append(True)
            if self.steps == 16 and self.kill:
                raise Stopped

    broken: list[bool] = []

    def hooked() -> nn.Module:
        made = net()
        made.register_forward_hook(
            lambda _m, _i, out: out * math.nan if broken and broken.pop() else out
        )
        return made

    def train(kill: bool, **more: Any) -> tb.Run:
        settings = {"batch_size": 6, "progress": Breaks(kill), **options, **more}
        return tb.fit(hooked, (INPUTS, TARGETS), "sgld", **settings)

    def saves_until(step: int) -> Any:
        original = Training._pause

        def pause(self: Training, stop: Any) -> tuple[bool, bool]:
            return (self.epoch * len(self.loader) + self.batch <= step), original(self, stop)[1]

        return pause

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_pause", saves_until(14))
        with pytest.raises(Stopped):
            train(True)
    state = RunFolder(tmp_path / "run").checkpoint.read()
    assert state is not None
    counted = [draw["number"] for draw in state["method"]["samples"]["draws"]]
    assert counted, "the checkpoint counts no samples: it came too early"
    left = json.loads((tmp_path / "bank" / "bank.json").read_text())["draws"]
    assert len(left) < len(counted)
    resumed = train(False, resume=True)
    whole = train(False, folder=tmp_path / "w", sample_folder=str(tmp_path / "wb"))
    assert len(bank(resumed)) == len(bank(whole))
    for one, other in zip(bank(whole), bank(resumed), strict=True):
        assert torch.equal(one, other)
    files = {f.name for f in (tmp_path / "bank").glob("draw-*")}
    assert len(files) == len(bank(resumed))  # those of the broken chain are gone in the end


def test_a_bank_of_a_part_resumes_with_the_digest_of_the_rest(tmp_path: Path) -> None:
    def train(name: str, **more: Any) -> tb.Run:
        folders = {"folder": tmp_path / name, "sample_folder": str(tmp_path / f"{name}-bank")}
        return fit("sgld", params="2.*", burn_in=0.5, checkpoint_seconds=0.0, **folders, **more)

    with pytest.raises(Stopped):
        train("stopped", progress=StopAfter(31))
    assert json.loads((tmp_path / "stopped-bank" / "bank.json").read_text())["draws"]
    resumed, whole = train("stopped", resume=True), train("whole")
    assert resumed.posterior.rest == whole.posterior.rest != ""
    assert tb.load(tmp_path / "stopped-bank", resumed.model).rest == whole.posterior.rest
    for one, other in zip(whole.posterior.draws(99), resumed.posterior.draws(99), strict=True):
        assert list(one) == ["2.weight", "2.bias"]
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_processes_pool_their_chains(tmp_path: Path) -> None:
    done = torchbayes(
        "train", "--data", "digits", "--model", "mlp", "--model-set", "hidden=[8]",
        "--batch-size", "256", "--method", "sgnht", "--epochs", "2", "--set", "samples=2",
        "--set", "chains=1", "--out", str(tmp_path / "run"), count=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    posterior = tb.load(tmp_path / "run" / "posterior.safetensors")
    assert isinstance(posterior, tb.Samples)
    first = [weights["layers.0.weight"] for weights in posterior]
    assert len(first) == 4
    # Two states of a chain are near each other, two chains are not.
    assert (first[0] - first[2]).norm() > 3 * (first[0] - first[1]).norm()


# -- Priors and bad input -----------------------------------------------------------------------------


def test_resnetpp_is_trained_with_its_priors() -> None:
    images = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(24) % 2
    run = tb.fit(
        lambda: resnetpp20(num_classes=2, in_channels=1, width=4), (images, labels), "atmc",
        epochs=8, batch_size=8, prior=resnetpp_prior(), progress=False,
    )  # fmt: skip
    draw = run.posterior.sample(torch.Generator().manual_seed(0))
    lengths = torch.cat([w.flatten(1).norm(dim=1) for n, w in draw.items() if ".direction" in n])
    # exp(−d/2 (‖φ‖²−1)²): a length has the standard deviation 1/(2√d), at most 1/6 for the smallest d = 9.
    assert (lengths - 1).abs().max() < 0.6
    assert run.history[-1]["nll"] < run.history[0]["nll"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"burn_in": 1.0}, "burn_in is 1: .* no update would be left"),
        ({"burn_in": 2.5}, "burn_in is 2.5"),
        ({"burn_in": -0.1}, "burn_in is -0.1"),
        ({"samples": 0}, "samples is 0"),
        ({"thinning": 0}, "thinning is 0"),
        ({"chains": 0}, "chains is 0"),
        ({"prior": "laplace"}, "prior is 'laplace': expected a prior such as"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fit(**options)
