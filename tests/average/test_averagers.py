"""What the averagers have in common: what they average, what they refuse, and how they resume."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchbayes.average import HWA, SWA, SWAG
from torchbayes.average.averager import Averager
from torchbayes.posterior import Point, Weights, load, snapshot
from torchbayes.variational import MeanField


class Net(nn.Module):
    """A frozen layer, a tied weight and a buffer beside ordinary weights."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 4).requires_grad_(False)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.frozen(x)))


def field(model: nn.Module) -> MeanField:
    """A mean field in which only one of the trained weights is random."""
    return MeanField(model, params=["first.weight"], init_std=0.1)


MAKERS: dict[str, Callable[[nn.Module], Averager[Any]]] = {
    "swa": SWA,
    "swag-diagonal": lambda model: SWAG(model, rank=0),
    "swag": lambda model: SWAG(model, rank=3),
    "hwa": lambda model: HWA(field(model)),
    "hwa-low-rank": lambda model: HWA(field(model), rank=3),
}
every_averager = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))


def move(model: Net, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.seen += 1


def tensors(averager: Averager[Any]) -> Weights:
    groups = averager.posterior()._file_tensors()
    return {f"{group}/{n}": t for group, weights in groups.items() for n, t in weights.items()}


def assert_same(left: Averager[Any], right: Averager[Any]) -> None:
    one, two = tensors(left), tensors(right)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@every_averager
def test_averages_what_is_trained_and_keeps_the_rest(make: Callable[..., Any]) -> None:
    model = Net()
    averager, seen = make(model), []
    for seed in range(4):
        move(model, seed)
        averager.update()
        seen.append(snapshot(model))
    posterior = averager.posterior()
    mean = posterior.mean()
    # The tied weight once, and nothing that is frozen.
    assert mean.keys() == snapshot(model).keys() - {"frozen.weight", "frozen.bias"}
    for name in ("first.weight", "first.bias"):
        expected = np.mean([weights[name].numpy() for weights in seen], 0)
        np.testing.assert_allclose(mean[name], expected, rtol=1e-5, atol=1e-6)
    assert mean["seen"] == 4
    assert len(averager) == 4
    posterior.check(model)
    if not isinstance(posterior, Point):
        assert posterior.std().keys() == {"first.weight", "first.bias"}
        assert posterior.sample(torch.Generator().manual_seed(0)).keys() == mean.keys()
    nn.init.zeros_(model.frozen.weight)
    with pytest.raises(ValueError, match="the rest of the network is not the one"):
        posterior.check(model)


@every_averager
def test_watches_without_touching(make: Callable[..., Any]) -> None:
    model = Net()
    before = snapshot(model)
    averager = make(model)
    averager.update()
    early = averager.posterior()
    kept = early.mean()
    move(model, 0)
    averager.update()
    assert all(torch.equal(early.mean()[name], kept[name]) for name in kept)
    averager.posterior().mean()["first.weight"].zero_()
    assert not torch.equal(averager.posterior().mean()["first.weight"], torch.zeros(4, 4))
    move(model, 1)
    assert not torch.equal(before["first.weight"], model.first.weight)


@every_averager
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_resumed_is_bit_equal(make: Callable[..., Any], stop: int) -> None:
    model = Net()
    whole = make(model)
    file = io.BytesIO()
    for seed in range(8):
        if seed == stop:
            torch.save(whole.state_dict(), file)
        move(model, seed)
        whole.update()
    file.seek(0)
    twin = Net()
    twin.load_state_dict(model.state_dict())
    resumed = make(twin)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert len(resumed) == stop
    twin.seen.fill_(stop)
    for seed in range(stop, 8):
        move(twin, seed)
        resumed.update()
    assert_same(whole, resumed)


@every_averager
def test_a_loaded_state_is_a_copy(make: Callable[..., Any]) -> None:
    model = Net()
    one, other = make(model), make(model)
    one.update()
    other.load_state_dict(one.state_dict())
    assert_same(one, other)
    move(model, 0)
    one.update()
    assert len(other) == 1
    assert not torch.equal(one.mean()["first.weight"], other.mean()["first.weight"])


@every_averager
def test_posterior_goes_through_a_file(make: Callable[..., Any], tmp_path: Any) -> None:
    model = Net()
    averager = make(model)
    for seed in range(3):
        move(model, seed)
        averager.update()
    averager.posterior().save(tmp_path / "q.safetensors")
    loaded = load(tmp_path / "q.safetensors", model)
    assert type(loaded) is type(averager.posterior())
    assert loaded.model_name == "Net"
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    one, two = averager.posterior().sample(seeds[0]), loaded.sample(seeds[1])
    assert all(torch.equal(one[name], two[name]) for name in one)


@every_averager
def test_nothing_to_give_before_an_update(make: Callable[..., Any]) -> None:
    averager = make(Net())
    assert len(averager) == 0
    for ask in (averager.posterior, lambda: averager.posterior([torch.zeros(2, 3)]), averager.mean):
        with pytest.raises(ValueError, match=r"averaged nothing yet: call update\(\)"):
            ask()


def test_bfloat16_is_averaged_in_a_wider_type() -> None:
    """In bfloat16 the mean of 1 and then many 1.01s would stay at 1."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    swag, values = SWAG(model, rank=2), []
    for step in range(400):
        nn.init.constant_(model.weight, 1.0 if step < 200 else 1.0078125)
        swag.update()
        values.append(model.weight.item())
    q = swag.posterior()
    assert q.mean()["weight"].dtype == q.std()["weight"].dtype == torch.bfloat16
    assert swag._mean["weight"].item() == pytest.approx(np.mean(values), abs=1e-6)
    assert swag._spread["weight"].item() == pytest.approx(np.var(values), rel=1e-3)


@pytest.mark.parametrize("rank", [-1, 1])
def test_refuses_ranks_without_a_covariance(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank is {rank}: expected 0 .* or at least 2"):
        SWAG(Net(), rank)


@pytest.mark.parametrize("cls", [SWA, SWAG])
def test_refuses_a_model_without_trainable_weights(cls: type) -> None:
    with pytest.raises(ValueError, match="no trainable weights"):
        cls(nn.Linear(2, 1).requires_grad_(False))


def test_refuses_states_of_others() -> None:
    model = Net()
    swag = SWAG(model, rank=2)
    swag.update()
    with pytest.raises(ValueError, match="rank 2 but this SWAG has rank 5"):
        SWAG(model, rank=5).load_state_dict(swag.state_dict())
    with pytest.raises(ValueError, match=r"'bias' is absent in the state but \(1,\) in Linear"):
        SWAG(nn.Linear(3, 1), rank=2).load_state_dict(swag.state_dict())
    swa = SWA(model)
    swa.update()
    with pytest.raises(ValueError, match="rank None but this SWAG has rank 2"):
        SWAG(model, rank=2).load_state_dict(swa.state_dict())
