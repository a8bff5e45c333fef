"""What all ten optimisers share."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchbayes import optim
from torchbayes.optim.base import ModelOptimizer
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.optim.sampler import Sampler

ALL = [getattr(optim, name) for name in optim.__all__]
Pair = tuple[nn.Module, ModelOptimizer]


def test_every_optimiser_has_the_base() -> None:
    assert len(ALL) >= 12
    assert all(issubclass(kind, ModelOptimizer) for kind in ALL)


@pytest.mark.parametrize("base", [ModelOptimizer, Sampler, WeightOptimizer])
def test_a_class_that_lacks_something_cannot_be_instantiated(base: type[ModelOptimizer]) -> None:
    class Unfinished(base):  # type: ignore[misc, valid-type]
        pass

    missing = sorted(Unfinished.__abstractmethods__)
    assert missing
    with pytest.raises(TypeError, match=f"Unfinished.*{missing[0]}"):
        Unfinished(nn.Linear(2, 1), 0.1, train_size=3)


def train(model: nn.Module, optimizer: ModelOptimizer, steps: int) -> None:
    inputs = torch.linspace(-1, 1, 24).view(8, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(inputs) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
@pytest.mark.parametrize("kind", ALL)
def test_a_copied_pair_continues_as_the_original_would(
    kind: Callable[..., ModelOptimizer], duplicate: Callable[[Pair], Pair]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = kind(model) if kind is optim.MLE else kind(model, train_size=8)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # replaces the instance's `step`
    train(model, optimizer, 3)
    twin, its = duplicate((model, optimizer))
    assert its.model is twin
    assert its.param_groups[0]["params"][0] is next(twin.parameters())
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert {k: v for k, v in its.param_groups[0].items() if k != "params"} == options
    before = [p.detach().clone() for p in model.parameters()]
    train(twin, its, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    train(model, optimizer, 3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(twin, its, 2)
    train(model, optimizer, 2)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_refused_group_is_not_kept() -> None:
    model = nn.Linear(2, 1)
    optimizer: Any = optim.VOGN(model, train_size=3, params=[model.weight])
    with pytest.raises(ValueError, match=r"shape \(5,\) is not one of Linear's"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    assert len(optimizer.param_groups) == 1
