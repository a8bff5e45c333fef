"""What torch's optimisers do, every optimiser here does too."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from torchbayes import optim
from torchbayes.optim.natural_gradient import WeightOptimizer

from .faults import Failed, surroundings
from .problems import blobs, small_net

ALL = [getattr(optim, name) for name in optim.__all__]
every_optimiser = pytest.mark.parametrize("kind", ALL)


def make(kind: Any, model: nn.Module, **options: Any) -> Any:
    size = {} if kind is optim.MLE else {"train_size": 240}
    return kind(model, **size, **options)


def closure_of(model: nn.Module, optimizer: Any, fail: bool = False) -> Callable[[], Tensor]:
    x, y = blobs(48)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if fail:
            raise Failed
        return loss

    return closure


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def states(optimizer: Any) -> list[Any]:
    return [
        v.clone() if isinstance(v, Tensor) else v
        for s in optimizer.state.values()
        for v in s.values()
    ]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def trained(kind: Any, steps: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = small_net()
    optimizer = make(kind, model)
    for _ in range(steps):
        optimizer.step(closure_of(model, optimizer))
    return model, optimizer


@every_optimiser
def test_an_exception_in_the_closure_changes_nothing(kind: Any) -> None:
    model, optimizer = trained(kind)
    before, state, around = weights(model), states(optimizer), surroundings(model)
    generator = optimizer.generator.get_state()
    with pytest.raises(Failed):
        optimizer.step(closure_of(model, optimizer, fail=True))
    assert equal(weights(model), before)
    assert equal(states(optimizer), state)
    assert surroundings(model) == around
    optimizer.generator.set_state(generator)
    twin, its = trained(kind)  # the step that failed has left no trace
    for one, two in ((model, optimizer), (twin, its)):
        two.step(closure_of(one, two))
    assert equal(weights(model), weights(twin))


@every_optimiser
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(kind: Any, bad: float) -> None:
    if issubclass(kind, optim.MAP):
        pytest.skip("as in torch: fit looks at the next loss")
    model, optimizer = trained(kind)
    before, state = weights(model), states(optimizer)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * bad

    hook = model[2].register_forward_hook(lambda _m, _i, output: Broken.apply(output))
    with pytest.raises(FloatingPointError, match=r"'(0|2)\.weight' is not finite.* after 3 others"):
        optimizer.step(closure_of(model, optimizer))
    hook.remove()
    assert equal(weights(model), before)
    assert equal(states(optimizer), state)
    optimizer.step(closure_of(model, optimizer))
    assert all(bool(torch.isfinite(w).all()) for w in weights(model))


@pytest.mark.parametrize("kind", [k for k in ALL if issubclass(k, WeightOptimizer)])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_no_copy_inside_sampled(kind: Any, duplicate: Callable[[Any], Any]) -> None:
    model, optimizer = trained(kind)
    with optimizer.sampled(), pytest.raises(RuntimeError, match="take the draw for the mean"):
        duplicate(optimizer)
    duplicate((model, optimizer))


@every_optimiser
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_of_the_optimiser_alone_has_a_network_of_its_own(
    kind: Any, duplicate: Callable[[Any], Any]
) -> None:
    model, optimizer = trained(kind)
    twin = duplicate(optimizer)
    assert twin.model is not model
    for one, two in ((model, optimizer), (twin.model, twin)):
        for _ in range(2):
            two.step(closure_of(one, two))
    assert equal(weights(model), weights(twin.model))


@every_optimiser
def test_hooks_of_steps_and_states(kind: Any) -> None:
    model, optimizer = trained(kind, 1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"mine": 1})
    optimizer.step(closure_of(model, optimizer))
    assert seen == ["before", "after"]
    assert optimizer.state_dict()["mine"] == 1


@every_optimiser
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=3),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5, 1), lr_scheduler.ExponentialLR(o, 0.9)], [1]
        ),
    ],
)
def test_schedulers_change_the_rate(kind: Any, schedule: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model = small_net()
    optimizer = make(kind, model)
    scheduler = schedule(optimizer)
    rates = set()
    for _ in range(4):
        optimizer.step(closure_of(model, optimizer))
        scheduler.step()
        rates.add(float(optimizer.param_groups[0]["lr"]))
    assert len(rates) > 1


@every_optimiser
def test_a_state_of_another_network_is_refused(kind: Any) -> None:
    _, optimizer = trained(kind, 1)
    other = make(kind, nn.Linear(3, 2))
    with pytest.raises(ValueError, match="parameter group"):
        other.load_state_dict(optimizer.state_dict())


@every_optimiser
def test_scalar_and_empty_parameters(kind: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()
            self.scale = nn.Parameter(torch.ones(()))
            self.nothing = nn.Parameter(torch.ones(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.scale + self.nothing.sum()

    torch.manual_seed(0)
    model = Odd()
    try:
        optimizer = make(kind, model)
        for _ in range(2):
            optimizer.step(closure_of(model, optimizer))
    except ValueError as error:  # curvature of a weight that no layer owns
        told = str(error)
    else:
        told = ""
        assert all(bool(torch.isfinite(w).all()) for w in weights(model))
    assert not told or ("scale" in told or "nothing" in told), told


def test_discarded_optimisers_leave_nothing_on_the_network() -> None:
    torch.manual_seed(0)
    model = small_net()
    around, gone = surroundings(model), []
    for kind in ALL:
        optimizer = make(kind, model)
        optimizer.step(closure_of(model, optimizer))
        gone.append((kind, weakref.ref(optimizer)))
    del optimizer
    gc.collect()
    assert [kind for kind, still in gone if still() is not None] == []
    after = surroundings(model)
    assert [key for key in around if key != "torch" and around[key] != after[key]] == []
