"""Private copies: a module of their own that shares the weights' memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.core.batch import uncompiled
from torchbayes.core.private import private_copy


def test_weights_are_shared_and_everything_else_is_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[0].weight.requires_grad_(False)
    twin = private_copy(model)
    assert not any(module.training for module in twin.modules())
    assert all(module.training for module in model.modules())
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert own is not other
        assert own.data_ptr() == other.data_ptr()
        assert own.requires_grad == other.requires_grad
    for own_buffer, other_buffer in zip(model.buffers(), twin.buffers(), strict=True):
        assert own_buffer.data_ptr() != other_buffer.data_ptr()
        assert torch.equal(own_buffer, other_buffer)


def test_ties_places_and_references_are_those_of_the_original() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.two.weight = self.one.weight
            self.again, self.order = self.one, [self.two, self.one]
            self.act = self.squash

        def squash(self, x: Tensor) -> Tensor:
            return x.tanh() + self.one.bias

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.order:
                x = self.act(layer(x))
            return x

    model, x = Net().eval(), torch.randn(3, 2)
    twin = private_copy(model)
    assert twin.two.weight is twin.one.weight
    assert twin.again is twin.one
    assert twin.order[1] is twin.one
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        twin.one.bias = nn.Parameter(twin.one.bias + 1)
    assert not torch.equal(twin(x), model(x))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
        lambda: nn.LSTM(3, 2, num_layers=2),
        lambda: nn.MultiheadAttention(3, 1).requires_grad_(False),
    ],
)
def test_modules_that_are_hard_to_copy(make: Any) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(4, 3)
    args = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
    expected, found = model(*args), private_copy(model)(*args)
    torch.testing.assert_close(found, expected)


def test_what_cannot_be_copied_is_common_to_both() -> None:
    class Guarded(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 3)
            self.lock = threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                return super().forward(x)

    model = Guarded()
    assert private_copy(model).lock is model.lock
    assert len(tb.predictive(model, tb.Point(tb.snapshot(model)), torch.ones(4, 2))) == 4


def test_a_network_that_refuses_to_be_copied() -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("there is only one")

    model = Single(2, 3)
    with pytest.raises(TypeError, match=r"Single cannot be copied \(there is only one\)"):
        tb.predictive(model, tb.Point(tb.snapshot(model)), torch.ones(4, 2))


@pytest.mark.parametrize("split", [True, False])
def test_a_lambda_that_refers_to_the_module_is_not_run_with_other_weights(split: bool) -> None:
    class Closure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)
            self.run = lambda x: self.layer(x)

        def forward(self, x: Tensor) -> Any:
            return self.run(x)

    model = Closure()
    with pytest.raises(TypeError, match=r"weight 'layer\.weight' through a function that refers"):
        tb.predictive(model, tb.Point(tb.snapshot(model)), torch.ones(4, 2), split=split)


def test_hooks_of_other_objects_are_called_and_not_copied() -> None:
    class Log:
        def __init__(self) -> None:
            self.shapes: list[tuple[int, ...]] = []

        def see(self, _module: nn.Module, _inputs: Any, outputs: Tensor) -> None:
            self.shapes.append(tuple(outputs.shape))

    model, log = nn.Linear(2, 3), Log()
    model.register_forward_hook(log.see)
    tb.predictive(model, tb.Point(tb.snapshot(model)), torch.ones(4, 2))
    assert (4, 3) in log.shapes


def test_the_compiler_is_as_before_when_threads_overlap() -> None:
    dynamo = pytest.importorskip("torch._dynamo.eval_frame")
    before = dynamo._stance
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with uncompiled():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(30)
    with uncompiled():
        leave.set()
        thread.join()
        assert dynamo._stance.stance == "force_eager"
    assert dynamo._stance == before
