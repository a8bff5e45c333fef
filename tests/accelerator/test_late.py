"""What an accelerator shows one step late: gradients that are not finite, and chains that have died."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from torchbayes.core.late import Late
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.train.failures import TrainingError

from ..conformance.problems import blobs, small_net
from ..conformance.test_methods import assert_equal
from ..stopping import StopAfter, Stopped


class _Spoiled(torch.autograd.Function):
    """The identity, with gradients that are not a number for entries above 100."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.masked_fill(ctx.saved_tensors[0] > 100, torch.nan)

    generate_vmap_rule = True


class _Body(nn.Module):
    """Its loss stays finite when its gradient does not: from inputs of 1,000 on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = _Spoiled.apply(self.first(x) + x[:, :1])
        return self.second(torch.tanh(hidden))


@pytest.mark.parametrize("name", ["IVON", "KFAC", "NoisyKFAC", "SGLD", "VOGN"])
def test_a_loop_of_ones_own_hears_of_it_at_the_next_step(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model = small_net().to(device)
    optimizer = getattr(tb, name)(model, train_size=240)
    x, y = (tensor.to(device) for tensor in blobs(16))
    factor = 1.0

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = factor * F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    good = copy.deepcopy(optimizer.state_dict())
    weights = tb.snapshot(model)
    factor = torch.nan
    asks = [lambda: optimizer.step(closure), optimizer.state_dict]
    if isinstance(optimizer, WeightOptimizer):
        asks.append(optimizer.posterior)
    for ask in asks:
        optimizer.step(closure)
        with pytest.raises(
            FloatingPointError, match=r"'\w+\.\w+' was not finite in the last step, after 3"
        ):
            ask()
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(good))
        optimizer.look()  # which has been forgotten
    factor = 1.0
    for _ in range(2):
        optimizer.step(closure)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def _batches(bad: int) -> DataLoader[Any]:
    """Eight batches in their order, of which one has inputs that spoil the gradient."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    inputs[8 * bad : 8 * bad + 8, 0] = 1000.0
    return DataLoader(TensorDataset(inputs, torch.arange(64) % 3), batch_size=8)


def test_numbers_of_a_device_that_is_not_the_current_one(device: torch.device) -> None:
    last = torch.device(device.type, torch.accelerator.device_count() - 1)
    late = Late()
    late.exchange({"loss": torch.tensor(2.0, device=last)}, "the first")
    assert late.rest() == ({"loss": 2.0}, "the first")


@pytest.mark.parametrize("bad", [0, 3, 7])
@pytest.mark.parametrize("method", ["ivon", "noisy-kfac", "vogn"])
def test_fit_names_the_update(method: str, bad: int, device: torch.device) -> None:
    warned = pytest.warns(UserWarning, match="goes back") if bad else nullcontext()
    with pytest.raises(TrainingError, match=rf"step {bad} \(epoch 1\).*'first\.") as failed, warned:
        tb.fit(_Body, _batches(bad), method, epochs=2, train_size=64, device=device, progress=False)
    assert failed.value.step == bad


def test_what_is_noticed_before_a_checkpoint_goes_back_too(
    device: torch.device, tmp_path: Path
) -> None:
    """As without one: a bad update in the first epoch leads back to its beginning."""
    with pytest.raises(TrainingError, match="step 3"), pytest.warns(UserWarning, match="goes back"):
        tb.fit(
            _Body, _batches(3), "ivon", epochs=1, train_size=64, device=device, folder=tmp_path,
            checkpoint_seconds=0.0, progress=False,
        )  # fmt: skip


def test_the_prior_that_the_evidence_chooses(device: torch.device) -> None:
    run = tb.fit(
        small_net, blobs(64), "map", epochs=4, evidence_every=2, device=device, progress=False
    )
    found = [row["prior_precision"] for row in run.history]
    assert found[0] == found[1] == 1.0 != found[2] == found[3]


@pytest.mark.parametrize("bad", [3, 7])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_chains_that_die(
    side_by_side: bool, bad: int, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """A chain of which nothing was good is left out, with the samples of its last, bad, step."""
    made = iter(range(100))

    def network() -> nn.Module:
        body = _Body()
        with torch.no_grad():  # all chains but the first have entries that nothing spoils
            body.first.bias.fill_(-2000.0 if next(made) else 0.0)
        return body

    with caplog.at_level("WARNING", "torchbayes"):
        run = tb.fit(
            network, _batches(bad), "sgld", lr=1e-6, epochs=1, train_size=64, device=device, chains=2,
            side_by_side=side_by_side, burn_in=0.0, thinning=1, progress=False,
        )  # fmt: skip
    assert sum("broke down" in record.message for record in caplog.records) == 1, caplog.text
    assert len(run.posterior) == 8
    for weights in run.posterior:
        assert all(bool(w.isfinite().all()) for w in weights.values())


def test_no_chain_is_left(device: torch.device) -> None:
    with pytest.raises(TrainingError, match=r"step 0 .*no chain is left"):
        tb.fit(
            _Body, _batches(0), "sgld", lr=1e-6, epochs=1, train_size=64, device=device, chains=2,
            side_by_side=True, progress=False,
        )  # fmt: skip


def test_kfac_decomposes_a_step_after_the_curvature_has_grown(device: torch.device) -> None:
    torch.manual_seed(0)
    model = small_net().to(device)
    optimizer = tb.KFAC(model, train_size=240, refresh_every=100)
    x, y = (tensor.to(device) for tensor in blobs(16))

    def step(factor: float) -> list[Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = factor * F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        states = (optimizer.state[p] for p in model.parameters())
        return [state["output_cholesky"] for state in states if "output_cholesky" in state]

    for _ in range(15):
        before = step(1.0)
    same = [old is new for old, new in zip(before, step(5.0), strict=True)]
    assert same
    assert all(same)
    same = [old is new for old, new in zip(before, step(1.0), strict=True)]
    assert not any(same)


class _Run:
    """A training by Noisy K-FAC that gathers second moments at most every four steps.

    Args:
        device: Where.
        grows: The step from which on the loss is five times as large.
    """

    def __init__(self, device: torch.device, grows: int = 100) -> None:
        torch.manual_seed(0)
        self.device, self.grows = device, grows
        self.model = small_net().to(device)
        self.optimizer = tb.NoisyKFAC(self.model, train_size=240, statistics_every=4)

    def step(self, number: int) -> None:
        x, y = (tensor.to(self.device) for tensor in blobs(16, seed=number))
        with self.optimizer.sampled():
            self.optimizer.zero_grad()
            factor = 5.0 if number >= self.grows else 1.0
            (factor * F.cross_entropy(self.model(x), y)).backward()
        self.optimizer.step()

    def resumed(self) -> _Run:
        other = _Run(self.device, self.grows)
        state = copy.deepcopy(self.optimizer.state_dict())
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(state)
        return other

    def copied(self) -> _Run:
        other = _Run(self.device, self.grows)
        other.model, other.optimizer = copy.deepcopy((self.model, self.optimizer))
        return other


@pytest.mark.parametrize("grows", [100, 8])
@pytest.mark.parametrize("what", ["posterior", "state_dict", "resumed", "copied"])
def test_looking_at_kfac_between_steps_changes_no_bit(
    what: str, grows: int, device: torch.device
) -> None:
    run, looked_at = _Run(device, grows), _Run(device, grows)
    for number in range(20):
        run.step(number)
        looked_at.step(number)
        if what in ("resumed", "copied"):
            looked_at = getattr(looked_at, what)()
        else:
            getattr(looked_at.optimizer, what)()
    for one, two in zip(run.model.parameters(), looked_at.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("grows", range(2, 10))
def test_kfac_updates_every_layer_when_the_curvature_grows(
    grows: int, device: torch.device
) -> None:
    """Growth that is seen in a step which has gathered nothing does not make it one that should have."""
    run = _Run(device, grows)
    for number in range(16):
        run.step(number)
    steps = {state["step"] for state in run.optimizer.state.values() if "inputs" in state}
    assert steps == {16}


@pytest.mark.parametrize("every", [1, 4])
def test_kfac_resumes_after_its_first_steps(
    every: int, device: torch.device, tmp_path: Path
) -> None:
    settings = {
        "epochs": 3, "batch_size": 16, "checkpoint_seconds": 0, "device": device,
        "statistics_every": every,
    }  # fmt: skip
    data = blobs(160)
    whole = tb.fit(small_net, data, "noisy-kfac", progress=False, **settings)
    with pytest.raises(Stopped):
        tb.fit(small_net, data, "noisy-kfac", folder=tmp_path, progress=StopAfter(17), **settings)
    resumed = tb.fit(
        small_net, data, "noisy-kfac", folder=tmp_path, resume=True, progress=False, **settings
    )
    assert_equal(whole.posterior, resumed.posterior)


def test_kfac_names_a_factor_that_is_no_second_moment(device: torch.device) -> None:
    model = nn.Linear(4, 3).to(device)
    optimizer = tb.KFAC(model, train_size=240)
    x, y = (tensor.to(device) for tensor in blobs(16))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.state[model.weight]["outputs"].sub_(torch.eye(3, device=device))
    optimizer.step(closure)
    with pytest.raises(ValueError, match="expected a second moment"):
        optimizer.step(closure)
