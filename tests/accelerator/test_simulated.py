"""The simulated accelerators refuse what CUDA refuses, compute what the CPU computes, and can be left."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .simulated import KIND, simulated_accelerators

PLACE = f"{KIND}:1"


def on(device: str = PLACE) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "a tensor of the CPU": lambda x: x + torch.ones(4),
    "to the CPU": lambda x: torch.ones(3, 4) + x,
    "of the other one": lambda x: x + torch.ones(4, device="sim:0"),
    "a matrix": lambda x: x @ torch.ones(4, 1),
    "a number into which is written": lambda x: torch.zeros(()).add_(x.sum()),
    "one of several": lambda x: torch.cat([x, torch.ones(3, 4)]),
    "many at once": lambda x: torch._foreach_add_([x, x], [x, torch.ones(3, 4)]),
    "labels": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
    "rows to select": lambda x: x.index_select(0, torch.tensor([0])),
    "an array": lambda x: x.numpy(),
    "a generator of the CPU": lambda x: x.normal_(generator=on("cpu")),
    "a generator of the other one": lambda x: torch.randn(3, device=PLACE, generator=on("sim:0")),
    "a generator for the CPU": lambda x: torch.randn(3, generator=on()),
    "a generator's state": lambda x: on("cpu").set_state(on().get_state()),
    "a state of the CPU's": lambda x: on().set_state(on("cpu").get_state()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    with simulated_accelerators(), pytest.raises((RuntimeError, TypeError)) as refused:
        REFUSED[what](torch.ones(3, 4, device=PLACE))
    assert any(said in str(refused.value) for said in ("device", "state"))


def test_takes_what_cuda_takes() -> None:
    with simulated_accelerators():
        x = torch.arange(6.0, device=PLACE).view(2, 3)
        assert (x * torch.tensor(2.0) + 1).sum().item() == 36
        assert x[torch.tensor([1])].tolist() == [[3.0, 4.0, 5.0]]
        assert x.to("sim:0").device.index == 0
        assert x.new_tensor(1.0).device == torch.tensor(1, device=PLACE).device == x.device
        assert x.cpu().numpy().sum() == 15


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def trained(device: str, optimizer: type[torch.optim.Optimizer]) -> nn.Module:
    model = network().to(device)
    x = torch.randn(6, 2, 4, 4, generator=on("cpu")).to(device)
    y = (torch.arange(6) % 3).to(device)
    steps = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for _ in range(3):
        steps.zero_grad()
        F.cross_entropy(model(x), y).backward()
        steps.step()
    return model


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_computes_what_the_cpu_computes(optimizer: type[torch.optim.Optimizer]) -> None:
    expected = trained("cpu", optimizer).state_dict()
    with simulated_accelerators():
        found = trained(PLACE, optimizer).state_dict()
        for name, tensor in found.items():
            assert str(tensor.device) == PLACE
            torch.testing.assert_close(tensor.cpu(), expected[name])


def test_views_copies_files_and_vmap() -> None:
    with simulated_accelerators():
        x = torch.zeros(2, 3, device=PLACE)
        x.t()[1].fill_(2.0)
        assert x.sum().item() == 4
        model = network().to(PLACE)
        twin = copy.deepcopy(model)
        twin[4].weight.data.zero_()
        assert model[4].weight.abs().sum() > 0
        assert str(twin[4].weight.device) == PLACE
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        read = torch.load(file, map_location="cpu", weights_only=True)
        assert torch.equal(read["4.weight"], model[4].weight.cpu())
        gradients = torch.func.vmap(torch.func.grad(lambda w, r: (w * r).square().sum()), (None, 0))
        assert gradients(torch.ones(3, device=PLACE), x).tolist() == [[0.0, 8.0, 0.0]] * 2


def test_each_device_has_its_own_random_numbers() -> None:
    with simulated_accelerators():
        torch.manual_seed(0)
        state = torch.get_rng_state()
        one = F.dropout(torch.ones(20, device=PLACE))
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(0)
        assert torch.equal(F.dropout(torch.ones(20, device=PLACE)), one)


def test_none_is_there_afterwards() -> None:
    with simulated_accelerators():
        assert torch.accelerator.current_accelerator() == torch.device(KIND)
    assert torch.cuda.is_available() or not torch.accelerator.is_available()
    assert type(torch.Generator()) is torch._C.Generator
    with torch.random.fork_rng():
        torch.manual_seed(0)
